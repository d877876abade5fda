// recall: makes the selected rows resident and says in which slots they are. One launch, many blocks, no barrier
// between them: residency.cuh says what keeps them from each other's slots.
//
// A block takes consecutive entries of the selection, so that its misses are in order of address (positions ascend).
// Half of the warps
//   look up       what its entries name (look_up_rows.cuh), and write the slots of hits,
//   list misses   in order, in shared memory,
//   start rows    from host memory into registers, before there is a slot for them,
//   copy          those to their slots, then the rest (copy_rows.cuh), when it is the block's turn,
//   wait          for rows that other blocks fetch;
// the other half finds slots meanwhile (claim_slots.cuh), then helps to copy.
// The first blocks write the new rows of the pass, if kv is given (append_rows.cuh). Those have slots since begin, and
// entries that select them are hits. The launch may overlap the end of the kernel before it.
// Cost on an H200 (bench/results/recall.json): 3.6 us for 26,624 hits; 20, 64 and 206 us with 533, 2,665 and 13,312
// misses among them.
#include <algorithm>

#include "cache_manager/claim_slots.cuh"
#include "cache_manager/copy_rows.cuh"
#include "cache_manager/look_up_rows.cuh"
#include "cache_manager/recall.cuh"
#include "kernels/append_rows.cuh"
#include "kernels/launch.cuh"
#include "kernels/ptx/copy.cuh"

namespace echo {
namespace {

constexpr int kThreads = 512;
constexpr int kAllWarps = kThreads / kWarp;
constexpr int kLookers = kThreads - kClaimers;
constexpr int kLookWarps = kLookers / kWarp;
constexpr int kBlocksPerSm = 2;  ///< that run together
constexpr std::int32_t kLeastLanes = 4;
constexpr int kMostPerThread = 8;
constexpr int kMostEntries = kMostPerThread * kLookers;  ///< of a block

// Barriers of a block, apart from the claimers' own.
constexpr int kSlotsFound = 0;
constexpr int kLookBarrier = 2;  ///< of the lookers
constexpr int kListed = 3;       ///< the claimers wait for the lookers
constexpr int kOwnTurn = 4;      ///< to copy

struct RecallShared {
  LookUpShared<kLookWarps, kMostEntries> look_up;
  ClaimShared claim;
  CopyShared copy;
};

/// Nothing that other kernels write may be looked at before.
__device__ void begin() {
  wait_for_kernel_before();
  let_next_kernel_begin();
}

__device__ std::int32_t tick_of(const RecallParams& p) { return *p.step.tick + p.block.tick_offset; }

__device__ Copy copy_of(const LayerView& layer, const RecallShared& shared, std::int32_t missing,
                        const CopyQueue& queue) {
  return {layer, {shared.look_up.rows, shared.look_up.slots, missing}, queue, kLookWarps, kAllWarps};
}

/// Warps that look entries up, and copy what is missing.
template <int kPerThread>
__device__ void look_up_and_copy(const RecallParams& p, const CopyQueue& queue, std::int32_t lanes,
                                 RecallShared& shared, const KernelErrorView& errors) {
  const OwnEntries<kPerThread> own(p, static_cast<std::int64_t>(queue.place) * kLookWarps + warp_index(), lanes);
  begin();
  const std::int32_t now = tick_of(p);
  Entry entries[kPerThread];
  read_selection(p, own, entries, errors);
  const LookUpCounts counts = look_up_all(p.layer, now, entries);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (own.has(i) && (entries[i].slot >= 0 || entries[i].row == kNone)) {
      p.slots[own.first + i * kWarp] = entries[i].slot;
    }
  }
  const std::int32_t missing = list_missing(entries, counts, kLookBarrier, shared.look_up);
  if (missing == 0) {
    announce(kListed, kThreads);
    if (threadIdx.x == 0) {
      queue.leave();
    }
  } else {
    const Copy copy = copy_of(p.layer, shared, missing, queue);
    if (threadIdx.x == 0) {
      shared.copy = copy.start();
    }
    announce(kListed, kThreads);
    meet(kLookBarrier, kLookers);  // the list is complete
    const auto meet_slots = [&] {
      meet(kSlotsFound, kThreads);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (entries[i].slot <= kFirstListed) {
          entries[i].slot = shared.look_up.slots[kFirstListed - entries[i].slot];
          p.slots[own.first + i * kWarp] = entries[i].slot;
        }
      }
    };
    if (copy.begins_at_once()) {
      copy.copy_first(warp_index(), meet_slots);
    } else {
      meet_slots();
      if (threadIdx.x == 0) {
        copy.wait();
      }
      meet(kOwnTurn, kThreads);
    }
    copy.copy_rest(shared.copy);
  }

  bool failed = false;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (entries[i].slot == kPending) {
      entries[i].slot = wait_for(p.layer, entries[i].row, now);
      p.slots[own.first + i * kWarp] = entries[i].slot;
    }
    failed = failed || (entries[i].row != kNone && entries[i].slot == kNone);
  }
  if (failed) {
    errors.raise(KernelError::pool_exhausted);
  }
}

/// The other warps: they find slots, then help to copy.
__device__ void find_slots(const RecallParams& p, const CopyQueue& queue, RecallShared& shared) {
  begin();
  const std::int32_t claimer = static_cast<std::int32_t>(threadIdx.x) - kLookers;
  LayerCounters& counters = *p.layer.counters;
  if (claimer == kClaimers - 1) {  // what is counted at the end, when nothing should have to be waited for
    ptx::prefetch(&counters.hits);
    ptx::prefetch(&counters.evictions);
  }
  const std::int32_t now = tick_of(p);
  const RowScores scores = row_scores(p);
  const ClaimPlace place =
      claim_place(p.layer, now, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x));
  const Sight ahead = look_ahead(p.layer, scores, now, place, claimer, shared.claim);
  join(kListed, kThreads);
  const LookUpSums sums = shared.look_up.sums();
  if (claimer == 0) {
    count(&counters.hits, sums.found - sums.missing);
    count(&counters.lost_races, sums.counts.lost);
    count(&counters.prefetched_used, sums.counts.ahead);
  }
  if (sums.missing == 0) {
    return;
  }
  if (claimer == 0) {
    AtomicWord(p.layer.replacement->missed).store(now, cuda::memory_order_relaxed);
  }
  const std::int32_t* rows = shared.look_up.rows;
  std::int32_t* slots = shared.look_up.slots;
  const std::int32_t evicted =
      claim_slots(p.layer, scores, now, place, claimer, ahead, rows, slots, sums.missing, shared.claim);
  meet(kSlotsFound, kThreads);
  publish_slots(p.layer, now, claimer, rows, slots, shared.claim.given);
  if (claimer == 0) {
    count(&counters.misses, shared.claim.given);
    count(&counters.evictions, evicted);
  }
  const Copy copy = copy_of(p.layer, shared, sums.missing, queue);
  if (!copy.begins_at_once()) {
    meet(kOwnTurn, kThreads);
  }
  copy.copy_rest(shared.copy);
}

/// The first blocks append, a row per warp; `lanes` of each warp of the others have entries, kPerThread each.
template <int kPerThread>
__global__ __launch_bounds__(kThreads, kBlocksPerSm) void recall(RecallParams p, std::int32_t append_blocks,
                                                                 std::int32_t lanes, KernelErrorView errors) {
  __shared__ RecallShared shared;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  if (block < append_blocks) {
    begin();
    const AppendParams append{.layer = p.layer,
                              .step = p.step,
                              .shape = p.shape,
                              .kv = p.kv,
                              .kv_dtype = p.kv_dtype,
                              .index_key = nullptr,
                              .index_key_dtype = DType::f32};
    append_row(append, block * kAllWarps + warp_index(), tick_of(p), errors);
    return;
  }
  const CopyQueue queue{.left = &p.layer.replacement->copied,
                        .place = block - append_blocks,
                        .blocks = static_cast<std::int32_t>(gridDim.x) - append_blocks};
  if (threadIdx.x < kLookers) {
    look_up_and_copy<kPerThread>(p, queue, lanes, shared, errors);
  } else {
    find_slots(p, queue, shared);
  }
}

template <int kPerThread>
void launch_sized(const RecallParams& params, std::int32_t lanes, const LaunchContext& context) {
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  const unsigned append_blocks = params.kv == nullptr ? 0U : blocks_for(params.step.rows, kAllWarps);
  launch_early(context, recall<kPerThread>, append_blocks + blocks_for(entries, kPerThread * kLookWarps * lanes),
               kThreads, 0, params, static_cast<std::int32_t>(append_blocks), lanes, context.errors);
}

}  // namespace

void launch_recall(const RecallParams& params, const LaunchContext& context) {
  // As few entries per warp as still lets all blocks run together, but some; two blocks on a multiprocessor only where
  // the alternative is more than one entry per thread.
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  std::int64_t each = (entries - 1) / (context.multiprocessors * kLookWarps) + 1;
  if (each <= kWarp) {
    std::int32_t lanes = kLeastLanes;
    while (lanes < each) {
      lanes *= 2;
    }
    return launch_sized<1>(params, lanes, context);
  }
  each = (each - 1) / kBlocksPerSm + 1;
  if (each <= kWarp) {
    launch_sized<1>(params, kWarp, context);
  } else if (each <= 2 * kWarp) {
    launch_sized<2>(params, kWarp, context);
  } else if (each <= 4 * kWarp) {
    launch_sized<4>(params, kWarp, context);
  } else {
    launch_sized<kMostPerThread>(params, kWarp, context);
  }
}

}  // namespace echo
