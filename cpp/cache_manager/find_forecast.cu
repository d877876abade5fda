// find_forecast: rows that the next step probably selects, and slots for them. Few thread blocks beside the pass's
// stream (forecast_branch.hpp), each for one batch entry after the other.
//
// Of the entry's near tokens (near_tokens.cuh) that are not resident the best are claimed, as far as the cap goes.
// Slots are free ones, else the coldest of a few windows of the pool, as in a recall: by score, and none of a row that
// is not farther from being selected than those that are claimed. What gets no slot is given up. The list goes to
// fetch_forecast; until that has run, rows are kPending and slots kClaimed, which nobody looks at: the layer's next
// look-up comes behind both. Cost: that of the near tokens, and 3 us for each window.
#include <algorithm>

#include "cache_manager/claim_slots.cuh"
#include "cache_manager/find_forecast.cuh"
#include "cache_manager/near_tokens.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = kNearThreads;    ///< the first kClaimers of which find slots
constexpr std::int32_t kMostWindows = 4;  ///< of the pool
constexpr std::int32_t kOfWindow = 64;    ///< slots that are taken from one, where so many will do
constexpr std::int32_t kFinders = 16;     ///< thread blocks

struct FindShared {
  NearShared near;
  std::int32_t claimed;
  std::int32_t farthest;  ///< bits of a float
  std::int32_t rows[kMostForecast];
  std::int32_t slots[kMostForecast];
  ClaimShared claim;
};

/// Claims the best of them.
__device__ void claim_rows(const ForecastParams& p, const Asked& asked, FindShared& shared) {
  const std::int32_t found = min(shared.near.found, kMostNear);
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < found; i += kThreads) {
    const NearToken token = shared.near.near[i];
    const std::int32_t bin = near_bin(token.below);
    const bool chosen = token.place != kNone &&
                        (bin < shared.near.edge || (bin == shared.near.edge && atomicSub(&shared.near.rest, 1) > 0));
    if (chosen && claim_row(p.layer, token.place)) {
      shared.rows[atomicAdd(&shared.claimed, 1)] = token.place;
      const float distance = score_distance(asked.kth, value_of_key(asked.kth_key - token.below));
      atomicMax(&shared.farthest, __float_as_int(distance));
    }
  }
}

/// Free slots for the first of the claimed rows.
__device__ void pop_slots(const LayerView& layer, FindShared& shared) {
  if (threadIdx.x == 0) {
    const std::int32_t needed = shared.claimed;
    std::int32_t popped = 0;
    if (AtomicWord(layer.replacement->free).load(cuda::memory_order_relaxed) > 0) {
      // Others may have emptied the stack since; nobody pushes in this launch, so what is below zero is nothing.
      const std::int32_t top = atomicSub(&layer.replacement->free, needed);
      popped = min(max(top, 0), needed);
      if (popped < needed) {
        atomicMax(&layer.replacement->free, 0);
      }
      shared.claim.top = top;
    }
    shared.claim.given = popped;
    shared.claim.popped = popped;
  }
  __syncthreads();
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < shared.claim.popped; i += kThreads) {
    const std::int32_t slot = layer.free_slots[shared.claim.top - 1 - i];
    assign(layer, slot, shared.rows[i]);
    shared.slots[i] = slot;
  }
}

/// The windows of the pool in which an entry looks for slots: not where the recall has just looked.
__device__ ClaimPlace place_of(const LayerView& layer, std::int32_t now, std::int32_t entry, std::int32_t entries) {
  ClaimPlace place = claim_place(layer, now, entry, entries);
  place.first = (place.first + layer.slots / 2) % layer.slots;
  return place;
}

/// Slots of rows that are farther away, for the rest. By the claimers, with what each saw of the first window.
__device__ void take_slots(const ForecastParams& p, std::int32_t now, const ClaimPlace& place, Sight sight,
                           FindShared& shared) {
  const auto claimer = static_cast<std::int32_t>(threadIdx.x);
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
__device__ std::int32_t find_rows(const ForecastParams& p, const ForecastLists& lists, std::int32_t index,
                                  std::int32_t entries, std::int32_t now, FindShared& shared,
                                  const KernelErrorView& errors) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const Asked asked(p, p.block.first / p.step.query_rows + index, errors);
  if (asked.length <= p.shape.top_k || !isfinite(asked.kth)) {
    return 0;
  }
  const ClaimPlace place = place_of(p.layer, now, index, entries);
  Sight ahead;
  if (thread < min(place.window, kClaimers)) {
    ahead = look_at(p.layer, row_scores(p), now, place, static_cast<std::uint32_t>(thread));
  }
  clear_near_bins(shared.near);
  if (thread == 0) {
    shared.near.found = shared.claimed = shared.farthest = 0;
  }
  __syncthreads();
  const std::uint32_t reach = find_reach(asked, forecast_reach(p.shape.top_k), shared.near);
  list_near(asked, now, reach, shared.near);
  __syncthreads();
  look_up_near(p, asked, shared.near, errors);
  __syncthreads();
  if (warp_index() == 0) {
    find_near_bin(shared.near, lists.cap);
  }
  __syncthreads();
  claim_rows(p, asked, shared);
  __syncthreads();
  if (shared.claimed == 0) {
    return 0;
  }
  pop_slots(p.layer, shared);
  __syncthreads();
  if (thread < kClaimers) {
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

__global__ __launch_bounds__(kThreads) void find_forecast(const __grid_constant__ ForecastParams p, ForecastLists lists,
                                                          std::int32_t entries, KernelErrorView errors) {
  __shared__ FindShared shared;
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  for (auto entry = static_cast<std::int32_t>(blockIdx.x); entry < entries;
       entry += static_cast<std::int32_t>(gridDim.x)) {
    const bool late =
        __syncthreads_or(threadIdx.x == 0 && AtomicWord(*lists.ended).load(cuda::memory_order_relaxed) == now);
    const std::int32_t found = late ? 0 : find_rows(p, lists, entry, entries, now, shared, errors);
    if (threadIdx.x == 0) {
      lists.counts[entry] = found;
    }
  }
}

__global__ void end_forecast(StepView step, std::int32_t tick_offset, std::int32_t* ended) {
  AtomicWord(*ended).store(*step.tick + tick_offset, cuda::memory_order_relaxed);
}

}  // namespace

void launch_find_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context) {
  const std::int32_t entries = forecast_entries(params);
  launch(context, find_forecast, static_cast<unsigned>(std::min(entries, kFinders)), kThreads, 0, params, lists,
         entries, context.errors);
}

void launch_end_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context) {
  launch(context, end_forecast, 1, 1, 0, params.step, params.block.tick_offset, lists.ended);
}

}  // namespace echo
