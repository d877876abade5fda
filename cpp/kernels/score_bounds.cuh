#pragma once
// The bounds of a row, from the counts of its sample (sift_bounds.hpp). A lane takes eight bins: counts from the top
// down by a sum over the warp, then the highest bin from which on there are enough. The first to set them wins.

#include "kernels/score_runs.cuh"
#include "kernels/sift_bounds.hpp"

namespace echo {

/// Sets the bounds of a row from what has been counted of its sample, if that will do, unless somebody has. Returns
/// those that are set; 0: none. By a warp.
__device__ inline std::uint64_t set_bounds(const ScoreParams& p, RowSift& sift, std::int32_t length,
                                           std::int32_t sampled, std::int32_t first) {
  constexpr int kLaneBins = kSiftBins / kWarp;
  const auto* source = reinterpret_cast<const int4*>(sift.histogram) + lane_index() * 2;
  const int4 low = __ldcg(source);
  const int4 high = __ldcg(source + 1);
  const std::int32_t counts[kLaneBins] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  std::int32_t own = 0;
#pragma unroll
  for (const std::int32_t count : counts) {
    own += count;
  }
  const std::int32_t up_to = inclusive_warp_sum(own);
  std::int32_t from = __shfl_sync(kAllLanes, up_to, kWarp - 1) - up_to;  // counts of the bins above
  const SiftTargets targets = sift_targets(p.shape.top_k, p.sift.capacity, sampled, length);
  // The highest of the lane's bins from which on there are enough.
  std::int32_t candidates = kNone;
  std::int32_t prefetch = kNone;
  std::int32_t at_candidates = 0;
#pragma unroll
  for (int i = kLaneBins - 1; i >= 0; --i) {
    from += counts[i];
    if (candidates == kNone && from >= targets.candidates) {
      candidates = lane_index() * kLaneBins + i;
      at_candidates = from;
    }
    if (prefetch == kNone && from >= targets.prefetch) {
      prefetch = lane_index() * kLaneBins + i;
    }
  }
  const unsigned enough = __ballot_sync(kAllLanes, candidates != kNone);
  if (enough == 0U) {
    return 0U;
  }
  const int lane = kWarp - 1 - __clz(static_cast<int>(enough));
  candidates = __shfl_sync(kAllLanes, candidates, lane);
  at_candidates = __shfl_sync(kAllLanes, at_candidates, lane);
  prefetch = __reduce_max_sync(kAllLanes, prefetch);
  const std::uint32_t key = key_of_bin(candidates, first);
  if (key == 0U || at_candidates > targets.most) {
    return 0U;
  }
  // All that lies above the bins may be far more than k rows.
  const std::uint32_t prefetch_key = prefetch == kSiftBins - 1 ? 0U : key_of_bin(prefetch, first);
  std::uint64_t bounds = pack_bounds(key, prefetch_key == 0U ? kNoKey : prefetch_key);
  if (lane_index() == 0) {
    const std::uint64_t held =
        atomicCAS(reinterpret_cast<unsigned long long*>(&sift.bounds), 0ULL, static_cast<unsigned long long>(bounds));
    bounds = held == 0U ? bounds : held;
  }
  return __shfl_sync(kAllLanes, bounds, 0);
}

}  // namespace echo
