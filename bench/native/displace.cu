// displace: makes a call meet exactly the misses that are asked for, whatever scores select, with pools that stay full.
//
// A block per layer and entry. It marks random entries of the selection in a bitmap in shared memory; it walks a random
// permutation of the session's tokens, 512 at a time, for others that are not resident; then it releases the marked
// rows, as the product's release does, and lists them in the order of the selection. Cost: a few rounds of about 1 us;
// never timed.
#include "displace.hpp"

#include "bench_case.hpp"
#include "hashes.hpp"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace echo::bench {
namespace {

constexpr int kThreads = 512;
constexpr std::int32_t kWordBits = 32;

struct Shared {
  std::uint32_t chosen[kTopK / kWordBits];
  std::int32_t sums[kThreads / kWarp];
  std::int32_t place_of_new;  ///< of the new token in the permutation of the selection
};

/// Marks `count` random entries of the selection, `own` excepted.
__device__ void choose(const std::int32_t* selection, std::int32_t count, std::int32_t own, std::uint32_t key,
                       Shared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t i = thread; i < kTopK / kWordBits; i += kThreads) {
    shared.chosen[i] = 0;
  }
  if (thread == 0) {
    shared.place_of_new = kTopK;
  }
  __syncthreads();
  for (std::int32_t i = thread; i < kTopK; i += kThreads) {
    if (own != kNone && selection[permuted(i, kTopK, key)] == own) {
      shared.place_of_new = i;
    }
  }
  __syncthreads();
  const std::int32_t end = count + (shared.place_of_new < count ? 1 : 0);
  for (std::int32_t i = thread; i < end; i += kThreads) {
    if (i != shared.place_of_new) {
      const std::int32_t entry = permuted(i, kTopK, key);
      atomicOr(shared.chosen + entry / kWordBits, 1U << (entry % kWordBits));
    }
  }
  __syncthreads();
}

/// Writes `wanted` random tokens of the first `tokens` that are not resident, then kNone; returns how many there were.
__device__ std::int32_t find_absent(const LayerView& layer, const std::int32_t* table, std::int32_t tokens,
                                    std::int32_t wanted, std::uint32_t key, std::int32_t* coming, Shared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t found = 0;
  for (std::int32_t first = 0; first < tokens && found < wanted; first += kThreads) {
    const bool counts = first + thread < tokens;
    const std::int32_t token = counts ? permuted(first + thread, tokens, key) : 0;
    const bool absent = counts && layer.slot_of[host_row(table, token)] < 0;
    std::int32_t total = 0;
    const std::int32_t place = found + exclusive_sum<kThreads>(absent ? 1 : 0, total, shared.sums);
    if (absent && place < wanted) {
      coming[place] = token;
    }
    found = min(wanted, found + total);
  }
  for (std::int32_t i = found + thread; i < kTopK; i += kThreads) {
    coming[i] = kNone;
  }
  return found;
}

__device__ void release_row(const LayerView& layer, std::int32_t row) {
  const std::int32_t slot = atomicExch(layer.slot_of + row, kNone);
  if (slot >= 0) {
    layer.host_of[slot] = kNone;
    layer.stamp[slot] = kFree;
    layer.free_slots[atomicAdd(&layer.replacement->free, 1)] = slot;
  }
}

__global__ __launch_bounds__(kThreads) void displace(DisplaceParams p) {
  __shared__ Shared shared;
  const auto entry = static_cast<std::int32_t>(blockIdx.x);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const LayerView layer = p.layers[blockIdx.y];
  const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(entry) * p.step.table_stride;
  const std::int64_t first_entry = (static_cast<std::int64_t>(blockIdx.y) * p.step.rows + entry) * kTopK;
  const std::int32_t* selection = p.selection + first_entry;
  const std::int32_t position = p.step.positions[entry];
  const std::int32_t own = p.new_rows ? position : kNone;
  const std::int32_t misses = p.misses_of[entry];
  const std::uint32_t key = hash(hash(p.seed, blockIdx.y), static_cast<std::uint32_t>(entry));
  choose(selection, misses, own, key, shared);

  const bool own_resident = own != kNone && layer.slot_of[host_row(table, own)] >= 0;
  const std::int32_t wanted = misses + p.more_of[entry] + (own_resident ? 1 : 0);
  const std::int32_t tokens = p.new_rows ? position : position + 1;
  const std::int32_t found = find_absent(layer, table, tokens, wanted, hash(key), p.coming + first_entry, shared);
  if (found < wanted && !p.whole && thread == 0) {
    *p.failed = 1;
  }
  __syncthreads();  // all have looked at the map

  std::int32_t* missing = p.missing + static_cast<std::int64_t>(blockIdx.y) * p.misses + p.missing_before[entry];
  std::int32_t listed = 0;
  for (std::int32_t i = thread; i < kTopK; i += kThreads) {
    const bool misses_it = (shared.chosen[i / kWordBits] >> (i % kWordBits) & 1U) != 0U;
    std::int32_t total = 0;
    const std::int32_t place = listed + exclusive_sum<kThreads>(misses_it ? 1 : 0, total, shared.sums);
    if (misses_it) {
      missing[place] = host_row(table, selection[i]);
      release_row(layer, missing[place]);
    }
    listed += total;
  }
  if (own_resident && thread == 0) {
    release_row(layer, host_row(table, own));
  }
}

}  // namespace

void launch_displace(const DisplaceParams& params, const LaunchContext& context) {
  launch(context, displace, dim3(static_cast<unsigned>(params.step.rows), static_cast<unsigned>(params.layer_count)),
         kThreads, 0, params);
}

}  // namespace echo::bench
