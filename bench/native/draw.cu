// draw: what the sessions select, so that a call meets exactly the misses that are asked for.
//
// A block per layer and entry walks a random permutation of the entry's tokens, 512 at a time, and takes the first
// resident and the first other ones, as many as it needs of each: the maps are looked at as the cache manager left
// them, so its choice of victims changes nothing. What is taken is marked in a bitmap over the tokens, in shared
// memory; that is read out in order, so selections ascend. Cost: tokens / 512 rounds of about 1 us; never timed.
#include "draw.hpp"

#include "bench_case.hpp"
#include "hashes.hpp"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "rows.hpp"

namespace echo::bench {
namespace {

constexpr int kThreads = 512;
constexpr std::int32_t kWordBits = 32;
constexpr std::int32_t kNoSlot = 1 << 30;

struct Bitmaps {
  std::uint32_t* chosen;
  std::uint32_t* missing;
  std::int32_t words;  ///< of each
};

__device__ void mark(std::uint32_t* bitmap, std::int32_t position) {
  atomicOr(bitmap + position / kWordBits, 1U << (position % kWordBits));
}

/// Marks the tokens; false if there are too few.
__device__ bool choose(const DrawParams& p, std::int32_t entry, const LayerView& layer, const std::int32_t* table,
                       const Bitmaps& bitmaps, std::int32_t* sums) {
  const std::int32_t position = p.step.positions[entry];
  const std::int32_t tokens = p.new_rows ? position : position + 1;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::uint32_t key = hash(hash(p.seed, blockIdx.y), static_cast<std::uint32_t>(entry));
  std::int32_t hits = p.hits_of[entry];
  std::int32_t misses = p.misses_of[entry];
  for (std::int32_t first = 0; first < tokens && (hits > 0 || misses > 0); first += kThreads) {
    const std::int32_t count = min(kThreads, tokens - first);
    std::int32_t token = 0;
    bool resident = false;
    if (thread < count) {
      token = permuted(first + thread, tokens, key);
      resident = layer.slot_of[host_row(table, token)] >= 0;
    }
    std::int32_t residents = 0;
    const std::int32_t before = exclusive_sum<kThreads>(resident ? 1 : 0, residents, sums);
    if (thread < count && (resident ? before < hits : thread - before < misses)) {
      mark(bitmaps.chosen, token);
      if (!resident) {
        mark(bitmaps.missing, token);
      }
    }
    hits -= min(hits, residents);
    misses -= min(misses, count - residents);
  }
  if (p.new_rows && position != kNone && thread == 0) {
    mark(bitmaps.chosen, position);
  }
  return hits == 0 && misses == 0;
}

/// Calls write(i, token) for the i-th token of the bitmap, in order; returns how many there are.
template <typename Write>
__device__ std::int32_t read_out(const std::uint32_t* bitmap, std::int32_t words, std::int32_t* sums, Write write) {
  std::int32_t done = 0;
  for (std::int32_t first = 0; first < words; first += kThreads) {
    const std::int32_t word = first + static_cast<std::int32_t>(threadIdx.x);
    std::uint32_t bits = word < words ? bitmap[word] : 0U;
    std::int32_t total = 0;
    std::int32_t at = done + exclusive_sum<kThreads>(__popc(bits), total, sums);
    for (; bits != 0; bits &= bits - 1U) {
      write(at++, word * kWordBits + __ffs(static_cast<int>(bits)) - 1);
    }
    done += total;
  }
  return done;
}

__global__ __launch_bounds__(kThreads) void draw_selection(DrawParams p) {
  extern __shared__ std::uint32_t words[];
  __shared__ std::int32_t sums[kThreads / kWarp];
  const auto entry = static_cast<std::int32_t>(blockIdx.x);
  const LayerView layer = p.layers[blockIdx.y];
  const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(entry) * p.step.table_stride;
  const std::int32_t count = p.step.table_stride * (kTokensPerBlock / kWordBits);
  const Bitmaps bitmaps{.chosen = words, .missing = words + count, .words = count};
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < 2 * count; i += kThreads) {
    words[i] = 0;
  }
  __syncthreads();
  if (!choose(p, entry, layer, table, bitmaps, sums) && threadIdx.x == 0) {
    *p.failed = 1;
  }
  __syncthreads();
  const std::int64_t first = blockIdx.y * p.layer_entries + static_cast<std::int64_t>(entry) * kTopK;
  float* scores = p.scores + (static_cast<std::int64_t>(blockIdx.y) * p.step.rows + entry) * p.score_stride;
  const auto select = [&](std::int32_t i, std::int32_t token) {
    p.selection[first + i] = token;
    if (p.scores != nullptr) {
      scores[token] += kKthScore;
    }
  };
  const std::int32_t selected = read_out(bitmaps.chosen, count, sums, select);
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < kTopK; i += kThreads) {
    p.slots[first + i] = kNoSlot;
    if (i >= selected) {
      p.selection[first + i] = kNone;
    }
  }
  if (p.missing != nullptr) {
    std::int32_t* missing = p.missing + static_cast<std::int64_t>(blockIdx.y) * p.misses + p.missing_before[entry];
    read_out(bitmaps.missing, count, sums,
             [&](std::int32_t i, std::int32_t token) { missing[i] = host_row(table, token); });
  }
}

__global__ __launch_bounds__(kThreads) void shuffle_missing(DrawParams p) {
  const auto i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * p.misses;
  if (i < p.misses) {
    p.shuffled[first + i] = p.missing[first + permuted(i, p.misses, hash(p.seed, blockIdx.y))];
  }
}

}  // namespace

void launch_draw(const DrawParams& params, const LaunchContext& context) {
  const std::size_t bitmap_bytes = static_cast<std::size_t>(params.step.table_stride) * kTokensPerBlock / 8;
  launch(context, draw_selection, dim3(static_cast<unsigned>(params.step.rows), kLayers), kThreads, 2 * bitmap_bytes,
         params);
  if (params.shuffled != nullptr) {
    launch(context, shuffle_missing, dim3(blocks_for(params.misses, kThreads), kLayers), kThreads, 0, params);
  }
}

}  // namespace echo::bench
