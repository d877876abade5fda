#pragma once
// How many rows a layer may forecast: as many as there was time for lately, and some more to find out. Rows that are
// chosen and not fetched have cost others their slots for nothing.

#include "cache_manager/forecast_lists.hpp"

namespace echo {

/// Rows of each entry in this step.
__device__ inline std::int32_t share_of_pace(const ForecastPace& pace, std::int32_t cap, std::int32_t entries) {
  return pace.most == 0 ? cap : min(cap, max(pace.most / entries, 1));
}

/// What a warp of `warps` has fetched, and left for want of time. The last one says how many the next step may have.
__device__ inline void add_to_pace(ForecastPace& pace, std::int32_t fetched, std::int32_t left, std::int32_t entries,
                                   std::uint32_t warps) {
  atomicAdd(&pace.fetched, fetched);
  atomicAdd(&pace.left, left);
  __threadfence();
  if (atomicInc(&pace.warps, warps - 1U) == warps - 1U) {
    const std::int32_t all = atomicExch(&pace.fetched, 0);
    pace.most = next_pace(pace.most, all, atomicExch(&pace.left, 0), entries);
  }
}

}  // namespace echo
