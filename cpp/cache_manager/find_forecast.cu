// find_forecast: rows that the next step probably selects, and slots for them. A thread block per batch entry, beside
// the pass's stream (forecast_branch.hpp).
//
// Of the entry's near tokens (near_tokens.cuh) that are not resident the best are claimed, as far as the cap goes.
// Slots are free ones, else the coldest of a few windows of the pool, as in a recall: by score, and none of a row that
// is not farther from being selected than those that are claimed. What gets no slot is given up. The list goes to
// fetch_forecast; until that has run, rows are kPending and slots kClaimed, which nobody looks at: the layer's next
// look-up comes behind both. Cost: that of the near tokens, and 3 us for each window.

#include "cache_manager/claim_slots.cuh"
#include "cache_manager/find_forecast.cuh"
#include "cache_manager/near_tokens.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = kNearThreads;    ///< the first kClaimers of which find slots
constexpr std::int32_t kMostWindows = 4;  ///< of the pool
constexpr std::int32_t kOfWindow = 32;    ///< slots that are taken from one, where so many will do

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
      shared.claim.free = top;
    }
    shared.claim.given = popped;
    shared.claim.popped = popped;
  }
  __syncthreads();
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < shared.claim.popped; i += kThreads) {
    const std::int32_t slot = layer.free_slots[shared.claim.free - 1 - i];
    assign(layer, slot, shared.rows[i]);
    shared.slots[i] = slot;
  }
}

/// Slots of rows that are farther away, for the rest. By the claimers.
__device__ void take_slots(const ForecastParams& p, std::int32_t now, FindShared& shared) {
  const auto claimer = static_cast<std::int32_t>(threadIdx.x);
  const RowScores scores = row_scores(p);
  ClaimPlace place =
      claim_place(p.layer, now, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x));
  place.first = (place.first + p.layer.slots / 2) % p.layer.slots;  // not where the recall has just looked
  const float farthest = __int_as_float(shared.farthest);
  const std::int32_t needed = shared.claimed;
  const std::int32_t windows = min((needed - shared.claim.given - 1) / kOfWindow + 1, kMostWindows);
  for (std::int32_t turn = 0; turn < windows; ++turn) {
    const std::int32_t left = needed - shared.claim.given;
    if (left == 0) {
      break;
    }
    Sight sight;
    if (claimer < place.window) {
      const auto passed = static_cast<std::uint32_t>(turn) * static_cast<std::uint32_t>(place.window);
      sight = look_at(p.layer, scores, now, place, passed + static_cast<std::uint32_t>(claimer));
    }
    const float distance = sight.candidate.distance;
    if (distance >= 0.0F && distance <= farthest) {
      sight.slot = kNone;
    }
    take_coldest(p.layer, claimer, sight, (left - 1) / (windows - turn) + 1, shared.rows, shared.slots, shared.claim);
  }
}

__global__ __launch_bounds__(kThreads) void find_forecast(const __grid_constant__ ForecastParams p, ForecastLists lists,
                                                          KernelErrorView errors) {
  __shared__ FindShared shared;
  const std::int32_t entry = p.block.first / p.step.query_rows + static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const Asked asked(p, entry, errors);
  if (thread == 0) {
    lists.counts[blockIdx.x] = 0;
  }
  if (asked.length <= p.shape.top_k || !isfinite(asked.kth)) {
    return;
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
    return;
  }
  pop_slots(p.layer, shared);
  __syncthreads();
  if (thread < kClaimers) {
    take_slots(p, now, shared);
  }
  __syncthreads();
  const std::int32_t given = shared.claim.given;
  for (std::int32_t i = thread; i < shared.claimed; i += kThreads) {
    if (i < given) {
      const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * lists.cap + i;
      lists.rows[place] = shared.rows[i];
      lists.slots[place] = shared.slots[i];
    } else {
      give_up_row(p.layer, shared.rows[i]);
    }
  }
  if (thread == 0) {
    lists.counts[blockIdx.x] = given;
    LayerCounters& counters = *p.layer.counters;
    atomicAdd(reinterpret_cast<unsigned long long*>(&counters.forecast), static_cast<unsigned long long>(given));
    atomicAdd(reinterpret_cast<unsigned long long*>(&counters.evictions),
              static_cast<unsigned long long>(given - shared.claim.popped));
  }
}

}  // namespace

void launch_find_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context) {
  launch(context, find_forecast, static_cast<unsigned>(forecast_entries(params)), kThreads, 0, params, lists,
         context.errors);
}

}  // namespace echo
