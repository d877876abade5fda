// find_forecast: rows that the next step probably selects, and slots for them. Few thread blocks beside the pass's
// stream (forecast_branch.hpp), each for one batch entry after the other.
//
// Most of a block finds which of the tokens that just missed the entry's selection are not resident (near_tokens.cuh)
// and claims the best, as far as the cap goes; the others look at a window of the pool meanwhile. Slots are free
// ones, else the coldest of a few windows, as in a recall: by score, and none of a row that is not farther from being
// selected than those that are claimed. What gets no slot is given up. The list goes to fetch_forecast; until that has
// run, rows are kPending and slots kClaimed, which nobody looks at: the layer's next look-up comes behind both.
// Cost: 12 us for an entry on an H200, of accesses that depend on each other, and 3 us for each window but the first.
#include <algorithm>

#include "cache_manager/claim_slots.cuh"
#include "cache_manager/find_forecast.cuh"
#include "cache_manager/forecast_pace.cuh"
#include "cache_manager/free_stack.cuh"
#include "cache_manager/near_tokens.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = kNearThreads + kClaimers;
constexpr std::int32_t kMostWindows = 4;  ///< of the pool
constexpr std::int32_t kOfWindow = 64;    ///< slots that are taken from one, where so many will do

struct FindShared {
  NearShared near;
  std::int32_t claimed;
  std::int32_t farthest;  ///< bits of a float
  std::int32_t rows[kMostForecast];
  std::int32_t slots[kMostForecast];
  ClaimShared claim;

  __device__ void clear() {
    for (auto bin = static_cast<std::int32_t>(threadIdx.x); bin < kNearBins; bin += kThreads) {
      near.ranked[bin] = near.missing[bin] = 0;
    }
    if (threadIdx.x == 0) {
      near.at_edge = claimed = farthest = 0;
    }
  }
};

/// Claims the best rows of an entry for which `row` speaks. By the first threads.
__device__ void claim_rows(const ForecastParams& p, const NearLists& near, const ForecastLists& lists, std::int32_t row,
                           std::int32_t entries, FindShared& shared, const KernelErrorView& errors) {
  const std::int32_t most = share_of_pace(*lists.pace, lists.cap, entries);
  NearTokens tokens(p, near, row);
  tokens.choose(p, most, shared.near, errors);
  const float farthest = tokens.claim(p.layer, shared.rows, shared.claimed);
  const int most_bits = __reduce_max_sync(kAllLanes, __float_as_int(farthest));
  if (lane_index() == 0) {
    atomicMax(&shared.farthest, most_bits);
  }
}

/// What the block sees ahead of its slots, by the claimers: the first window, and whether any are free.
__device__ Sight look_ahead_of(const ForecastParams& p, std::int32_t now, const ClaimPlace& place, FindShared& shared) {
  const std::int32_t claimer = static_cast<std::int32_t>(threadIdx.x) - kNearThreads;
  const std::int32_t free = AtomicWord(p.layer.replacement->free).load(cuda::memory_order_relaxed);
  Sight sight;
  if (claimer < place.window) {
    sight = look_at(p.layer, row_scores(p), now, place, static_cast<std::uint32_t>(claimer));
  }
  if (claimer == 0) {
    shared.claim.free = free;
    shared.claim.given = shared.claim.popped = 0;
  }
  return sight;
}

/// Free slots for the first of the claimed rows. By the block.
__device__ void pop_slots(const LayerView& layer, FindShared& shared) {
  if (threadIdx.x == 0) {
    const std::int32_t top = pop_free(layer, shared.claimed);
    shared.claim.top = top;
    shared.claim.given = shared.claim.popped = min(max(top, 0), shared.claimed);
  }
  __syncthreads();
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < shared.claim.popped; i += kThreads) {
    const std::int32_t slot = layer.free_slots[shared.claim.top - 1 - i];
    assign(layer, slot, shared.rows[i]);
    shared.slots[i] = slot;
  }
  __syncthreads();
}

/// The windows of the pool in which an entry looks for slots: not where the recall has just looked.
__device__ ClaimPlace place_of(const LayerView& layer, std::int32_t now, std::int32_t entry, std::int32_t entries) {
  ClaimPlace place = claim_place(layer, now, entry, entries);
  const auto slots = static_cast<std::uint32_t>(layer.slots);
  place.first = static_cast<std::int32_t>((static_cast<std::uint32_t>(place.first) + slots / 2U) % slots);
  return place;
}

/// Slots of rows that are farther away, for the rest. By the claimers, with what each saw of the first window.
__device__ void take_slots(const ForecastParams& p, std::int32_t now, const ClaimPlace& place, Sight sight,
                           FindShared& shared) {
  const std::int32_t claimer = static_cast<std::int32_t>(threadIdx.x) - kNearThreads;
  const float farthest = __int_as_float(shared.farthest);
  const std::int32_t needed = shared.claimed;
  const std::int32_t windows = min((needed - shared.claim.given - 1) / kOfWindow + 1, kMostWindows);
  for (std::int32_t turn = 0; turn < windows; ++turn) {
    const std::int32_t left = needed - shared.claim.given;
    if (left == 0) {
      break;
    }
    if (turn > 0) {
      sight = {};
      if (claimer < place.window) {
        const auto passed = static_cast<std::uint32_t>(turn) * static_cast<std::uint32_t>(place.window);
        sight = look_at(p.layer, row_scores(p), now, place, passed + static_cast<std::uint32_t>(claimer));
      }
    }
    const float distance = sight.candidate.distance;
    if (distance >= 0.0F && distance <= farthest) {
      sight.slot = kNone;
    }
    sort_window(claimer, /*spares=*/true, sight, shared.claim);
    meet(kClaimBarrier, kClaimers);
    const Edge edge = find_edge(shared.claim, (left - 1) / (windows - turn) + 1);
    take_coldest(p.layer, sight, edge, shared.rows, shared.slots, shared.claim);
  }
}

/// Finds rows and slots for one entry; returns how many. By the whole block.
__device__ std::int32_t find_rows(const ForecastParams& p, const NearLists& near, const ForecastLists& lists,
                                  std::int32_t index, std::int32_t entries, std::int32_t now, FindShared& shared,
                                  const KernelErrorView& errors) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  shared.clear();
  __syncthreads();
  const ClaimPlace place = place_of(p.layer, now, index, entries);
  Sight ahead;
  if (thread < kNearThreads) {
    const std::int32_t entry = p.block.first / p.step.query_rows + index;
    const std::int32_t end = min((entry + 1) * p.step.query_rows, p.block.first + p.block.count);
    claim_rows(p, near, lists, end - 1, entries, shared, errors);
  } else {
    ahead = look_ahead_of(p, now, place, shared);
  }
  __syncthreads();
  if (shared.claimed == 0) {
    return 0;
  }
  if (shared.claim.free > 0) {
    pop_slots(p.layer, shared);
  }
  if (thread >= kNearThreads) {
    take_slots(p, now, place, ahead, shared);
  }
  __syncthreads();
  const std::int32_t given = shared.claim.given;
  for (std::int32_t i = thread; i < shared.claimed; i += kThreads) {
    if (i < given) {
      const std::int64_t at = static_cast<std::int64_t>(index) * lists.cap + i;
      lists.rows[at] = shared.rows[i];
      lists.slots[at] = shared.slots[i];
    } else {
      give_up_row(p.layer, shared.rows[i]);
    }
  }
  if (thread == 0) {
    count(&p.layer.counters->evictions, given - shared.claim.popped);
  }
  return given;
}

__global__ __launch_bounds__(kThreads, 1) void find_forecast(const __grid_constant__ ForecastParams p,
                                                             const __grid_constant__ NearLists near,
                                                             const __grid_constant__ ForecastLists lists,
                                                             std::int32_t entries, KernelErrorView errors) {
  __shared__ FindShared shared;
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *lists.ended = 0;
  }
  for (auto entry = static_cast<std::int32_t>(blockIdx.x); entry < entries;
       entry += static_cast<std::int32_t>(gridDim.x)) {
    const std::int32_t found = find_rows(p, near, lists, entry, entries, now, shared, errors);
    __syncthreads();  // the next entry's
    if (threadIdx.x == 0) {
      lists.counts[entry] = found;
    }
  }
}

__global__ void end_forecast(std::int32_t* ended) { *ended = 1; }

}  // namespace

void launch_find_forecast(const ForecastParams& params, const NearLists& near, const ForecastLists& lists,
                          const LaunchContext& context) {
  const std::int32_t entries = forecast_entries(params);
  launch(context, find_forecast, static_cast<unsigned>(std::min(entries, context.multiprocessors)), kThreads, 0, params,
         near, lists, entries, context.errors);
}

void launch_end_forecast(const ForecastLists& lists, const LaunchContext& context) {
  launch(context, end_forecast, 1, 1, 0, lists.ended);
}

}  // namespace echo
