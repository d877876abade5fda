#pragma once
// leave_hint: what a block of recall that gave slots away leaves for the new rows of the next step (hints.hpp).
//
// A hint for each block: of the slots of its last window the one that would have gone next; where hardly any is left,
// of the rows that it fetches itself the one that is the farthest below its k-th score. Blocks share the hints of the
// layer; the last that writes one wins. By the claimers while rows travel: a barrier of theirs, and little else.

#include "cache_manager/claim_slots.cuh"
#include "cache_manager/hints.hpp"
#include "kernels/number_formats.hpp"

namespace echo {

/// Of rows[0, given), by one warp. Called rarely: as a part of recall it would cost its other half registers.
__device__ __noinline__ inline Hint farthest_of(const RowScores& scores, std::int32_t now, const std::int32_t* rows,
                                                const std::int32_t* slots, std::int32_t given) {
  Hint own{kNone, now};
  std::uint32_t farthest = 0;
  for (std::int32_t i = lane_index(); i < given; i += kWarp) {
    float by = 0.0F;
    if (scores.below_kth(rows[i], by)) {
      const std::uint32_t key = ordered_key(by == by ? by : 3.0e38F);
      own.slot = key >= farthest ? slots[i] : own.slot;
      farthest = max(farthest, key);
    }
  }
  const bool is_farthest = farthest == __reduce_max_sync(kAllLanes, farthest);
  const unsigned lanes = __ballot_sync(kAllLanes, own.slot != kNone && is_farthest);
  own.slot = lanes == 0U ? kNone : __shfl_sync(kAllLanes, own.slot, __ffs(static_cast<int>(lanes)) - 1);
  return own;
}

/// By the claimers of a block, behind claim_slots: rows[0, given) got slots, some of them by eviction; `sight` is what
/// each claimer saw last and nobody asked for.
__device__ inline void leave_hint(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                  std::int32_t claimer, std::int32_t block, const Sight& sight,
                                  const std::int32_t* rows, const std::int32_t* slots, std::int32_t given,
                                  ClaimShared& shared) {
  if (!shared.hints) {
    return;
  }
  const bool left = sight.slot != kNone;
  const std::int32_t least = __reduce_min_sync(kAllLanes, left ? sight.level * kClaimers + claimer : kNoClaimer);
  const std::int32_t of_warp = __popc(__ballot_sync(kAllLanes, left));
  if (lane_index() == 0) {
    atomicMin(&shared.coldest, least);
    atomicAdd(&shared.left, of_warp);
  }
  meet(kClaimBarrier, kClaimers);
  Hint hint{kNone, kFree};
  if (shared.left >= kLeastLeft) {
    if (claimer == shared.coldest % kClaimers) {
      hint = {sight.slot, sight.stamp};
    }
  } else if (claimer < kWarp) {
    const Hint farthest = farthest_of(scores, now, rows, slots, given);
    if (claimer == 0) {
      hint = farthest;
    }
  }
  const Hints hints(layer);
  if (hint.slot != kNone && hints.count > 0) {
    hints.leave(block % hints.count, hint);
  }
}

}  // namespace echo
