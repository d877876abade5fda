// claim_slots: the replacement rule (replacement.hpp), for all misses of a call at once.
//
// One block, alone with the maps. It brings the histogram of ages up to date, reads the marked host
// rows off the bitmap in order (a summary word, then its 32 words as eight 16-byte loads; only
// parts with a mark are read), and lets the clock hand pass over 8,192 stamps per round, where a
// prefix sum hands the slots that may be taken to the misses in order: the first miss gets the
// first slot, as if one thread had done it. If there are too few, which the histogram tells
// beforehand, no slot is taken. Cost (estimated): 4 us without misses; with them one round per 8,192 / kSpread
// misses, at most one turn of the pool, and six scattered accesses per miss, 1,024 at a time.
#include "cache_manager/claim_slots.cuh"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 1024;
constexpr int kStampsPerThread = 8;
constexpr int kWordsPerLoad = 4;
constexpr int kLoadsPerSummaryWord = 32 / kWordsPerLoad;
constexpr int kStateWords = sizeof(ReplacementState) / sizeof(std::int32_t);
static_assert(kStateWords <= kThreads);

struct Shared {
  ReplacementState replacement;
  std::int32_t limit;
  std::int32_t evicted;
  std::int32_t warp_sums[kThreads / kWarp];
};

/// Calls `visit(word, first_row)` for the 32 words of `wanted` under a summary word.
template <typename Visit>
__device__ void for_words(const ClaimView& claim, std::int32_t summary_word, Visit visit) {
  const auto* words =
      reinterpret_cast<const uint4*>(claim.wanted) + static_cast<std::int64_t>(summary_word) * kLoadsPerSummaryWord;
  uint4 loaded[kLoadsPerSummaryWord];
#pragma unroll
  for (int i = 0; i < kLoadsPerSummaryWord; ++i) {
    loaded[i] = words[i];
  }
  std::int32_t row = summary_word * kRowsPerSummaryWord;
#pragma unroll
  for (int i = 0; i < kLoadsPerSummaryWord; ++i) {
    visit(loaded[i].x, row);
    visit(loaded[i].y, row + 32);
    visit(loaded[i].z, row + 64);
    visit(loaded[i].w, row + 96);
    row += 32 * kWordsPerLoad;
  }
}

__device__ void clear_words(const ClaimView& claim, std::int32_t summary_word) {
  auto* words = reinterpret_cast<uint4*>(claim.wanted) + static_cast<std::int64_t>(summary_word) * kLoadsPerSummaryWord;
#pragma unroll
  for (int i = 0; i < kLoadsPerSummaryWord; ++i) {
    words[i] = make_uint4(0U, 0U, 0U, 0U);
  }
  claim.summary[summary_word] = 0U;
}

/// Lists the marked rows in order (as far as the list goes) and clears the marks.
__device__ void collect_misses(const ClaimView& claim, Shared& shared) {
  std::int32_t count = 0;
  for (std::int32_t first = 0; first < claim.summary_words; first += kThreads) {
    const std::int32_t mine = first + static_cast<std::int32_t>(threadIdx.x);
    const bool marked = mine < claim.summary_words && claim.summary[mine] != 0U;
    if (!__syncthreads_or(marked)) {
      continue;
    }
    std::int32_t rows = 0;
    if (marked) {
      for_words(claim, mine, [&](std::uint32_t word, std::int32_t) { rows += __popc(word); });
    }
    std::int32_t total = 0;
    std::int32_t next = count + exclusive_sum<kThreads>(rows, total, shared.warp_sums);
    if (marked) {
      for_words(claim, mine, [&](std::uint32_t word, std::int32_t row) {
        for (; word != 0U; word &= word - 1U, ++next) {
          if (next < claim.most_misses) {
            claim.misses[next] = {row + __ffs(static_cast<int>(word)) - 1, kNone};
          }
        }
      });
      clear_words(claim, mine);
    }
    count += total;
  }
  __syncthreads();  // the list is read by other threads than those that wrote it
}

/// Gives the slot to the miss, and takes it from whatever it holds.
__device__ void assign(const LayerView& layer, std::int32_t slot, std::int32_t stamp, std::int32_t now, Miss& miss,
                       Shared& shared) {
  const std::int32_t old_row = layer.host_of[slot];
  if (old_row != kNone) {
    layer.slot_of[old_row] = kNone;
    atomicAdd(&shared.evicted, 1);
  }
  if (in_window(stamp, now)) {
    atomicSub(shared.replacement.recent + stamp % kWindow, 1);
  }
  layer.host_of[slot] = miss.host_row;
  layer.slot_of[miss.host_row] = slot;
  layer.stamp[slot] = now;
  miss.slot = slot;
}

/// Moves the hand over the pool, for one turn at most, until all misses have a slot; returns how
/// many do.
__device__ std::int32_t scan_clock(const LayerView& layer, const ClaimView& claim, std::int32_t missing,
                                   std::int32_t now, Shared& shared) {
  const std::int32_t hand = shared.replacement.hand;
  const std::int32_t limit = shared.limit;
  std::int32_t taken = 0;
  for (std::int64_t first = 0; first < layer.slots && taken < missing; first += kThreads * kStampsPerThread) {
    std::int32_t slots[kStampsPerThread];
    std::int32_t stamps[kStampsPerThread];
    std::int32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kStampsPerThread; ++i) {
      const std::int64_t passed = first + static_cast<std::int64_t>(threadIdx.x) * kStampsPerThread + i;
      const std::int64_t slot = hand + passed < layer.slots ? hand + passed : hand + passed - layer.slots;
      slots[i] = static_cast<std::int32_t>(slot);
      stamps[i] = passed < layer.slots ? layer.stamp[slot] : now;
      mine += may_take(stamps[i], limit) ? 1 : 0;
    }
    std::int32_t total = 0;
    std::int32_t rank = taken + exclusive_sum<kThreads>(mine, total, shared.warp_sums);
#pragma unroll
    for (int i = 0; i < kStampsPerThread; ++i) {
      if (may_take(stamps[i], limit) && rank < missing) {
        assign(layer, slots[i], stamps[i], now, claim.misses[rank], shared);
        if (++rank == missing) {
          shared.replacement.hand = slots[i] + 1 == layer.slots ? 0 : slots[i] + 1;
        }
      }
    }
    taken += total;
  }
  __syncthreads();
  return taken < missing ? taken : missing;
}

/// Brings the histogram to tick `now`, with the stamps that lookup has set.
__device__ void update_histogram(ClaimState& state, std::int32_t now, Shared& shared) {
  if (threadIdx.x == 0) {
    advance_window(shared.replacement, now);
  }
  __syncthreads();
  if (threadIdx.x < kWindow) {
    shared.replacement.recent[threadIdx.x] -= state.aged[threadIdx.x];
    state.aged[threadIdx.x] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.replacement.recent[now % kWindow] += state.stamped;
    state.stamped = 0;
    shared.evicted = 0;
  }
  __syncthreads();
}

__global__ __launch_bounds__(kThreads) void claim_slots(LayerView layer, const std::int32_t* tick,
                                                        std::int32_t tick_offset, ClaimView claim, bool appending,
                                                        KernelErrorView errors) {
  __shared__ Shared shared;
  const std::int32_t now = *tick + tick_offset;
  auto* replacement = reinterpret_cast<std::int32_t*>(layer.replacement);
  auto* working = reinterpret_cast<std::int32_t*>(&shared.replacement);
  if (threadIdx.x < kStateWords) {
    working[threadIdx.x] = replacement[threadIdx.x];
  }
  __syncthreads();
  update_histogram(*claim.state, now, shared);

  const std::int32_t wanted = claim.state->wanted;
  std::int32_t given = 0;
  if (wanted > 0) {
    collect_misses(claim, shared);
    // The histogram knows how many slots this tick has stamped, so whether there is room is clear
    // beforehand.
    const bool fits = wanted <= layer.slots - shared.replacement.recent[now % kWindow];
    if (threadIdx.x == 0 && fits) {
      shared.limit = age_limit(shared.replacement, layer.slots, now, wanted);
    }
    __syncthreads();
    if (fits) {
      given = scan_clock(layer, claim, wanted, now, shared);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (given < wanted) {
      errors.raise(KernelError::pool_exhausted);
    }
    shared.replacement.recent[now % kWindow] += given;
    shared.replacement.used += given - shared.evicted;
    const std::int32_t entries = claim.state->entries;
    layer.counters->evictions += shared.evicted;
    if (appending) {
      layer.counters->appended += entries;
    } else {
      layer.counters->misses += given;
      layer.counters->hits += entries - wanted;
    }
    claim.state->entries = 0;
    claim.state->wanted = 0;
    claim.state->missing = given;
  }
  __syncthreads();
  if (threadIdx.x < kStateWords) {
    replacement[threadIdx.x] = working[threadIdx.x];
  }
}

}  // namespace

void launch_claim_selected(const RecallParams& params, const ClaimView& claim, const LaunchContext& context) {
  launch(context, claim_slots, 1, kThreads, 0, params.layer, params.step.tick, params.block.tick_offset, claim, false,
         context.errors);
}

void launch_claim_new(const AppendParams& params, const ClaimView& claim, const LaunchContext& context) {
  launch(context, claim_slots, 1, kThreads, 0, params.layer, params.step.tick, 0, claim, true, context.errors);
}

}  // namespace echo
