#pragma once
// claim_slots: the replacement rule (replacement.hpp), by one block for the rows that it has to fetch. Any number of
// blocks may do so at the same time; each looks at windows of its own.
//
// Free slots are popped together. Then, window by window: a thread per slot reads stamp and host row (coalesced) and
// the row's score (three dependent loads, mostly from the L2 cache), a histogram of coldness in shared memory says down
// to which level slots go, and those threads claim theirs by compare-and-swap. Who loses one to another block leaves a
// gap that a later window fills. Behind the planned windows, the block makes one turn of the pool of its own for
// whatever may be taken; a slot that was passed then can never be taken again within the call, so one turn proves that
// none is left.
// Cost (estimated): 2-3 us per window, which callers hide behind the first rows on their way.

#include "cache_manager/residency.cuh"
#include "cache_manager/row_scores.hpp"
#include "kernels/warp.cuh"

namespace echo {

/// Shared memory of claim_slots.
struct ClaimShared {
  std::int32_t first;   ///< slot of the window, or number of free slots there were
  std::int32_t given;   ///< rows that have a slot
  std::int32_t popped;  ///< rows that have a slot which was free
  std::int32_t oldest;
  std::int32_t farthest;                 ///< bits of a float that is not negative: they compare like integers
  std::int32_t edge;                     ///< the last level of the histogram that goes, some of it
  std::int32_t at_edge;                  ///< slots of that level which go
  std::int32_t histogram[kColdest + 1];  ///< coldest first
};

/// Finds the level down to which `quota` slots go. By one warp.
__device__ inline void find_edge(ClaimShared& shared, std::int32_t quota) {
  static_assert(kColdest + 1 == 2 * kWarp);
  const std::int32_t lane = lane_index();
  const std::int32_t first = shared.histogram[2 * lane];
  const std::int32_t both = first + shared.histogram[2 * lane + 1];
  std::int32_t sum = both;
  for (int step = 1; step < kWarp; step *= 2) {
    const std::int32_t before = __shfl_up_sync(kAllLanes, sum, step);
    sum += lane >= step ? before : 0;
  }
  const std::int32_t before = sum - both;
  if (lane == kWarp - 1 && sum < quota) {
    shared.edge = kColdest;
    shared.at_edge = kWindow;
  }
  if (before < quota && quota <= sum) {
    const bool in_first = quota <= before + first;
    shared.edge = 2 * lane + (in_first ? 0 : 1);
    shared.at_edge = quota - before - (in_first ? 0 : first);
  }
}

/// Gives slots to rows[0, needed), which the block's threads found missing (look_up returned kNone) and listed in
/// shared memory: slots[i], kNone where there is none left. Called by all threads of a block of at least kWindow.
/// Returns how many rows were evicted, the same to all threads; slots are to be read behind a barrier.
__device__ inline std::int32_t claim_slots(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                           const std::int32_t* rows, std::int32_t* slots, std::int32_t needed,
                                           ClaimShared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  if (thread == 0) {
    std::int32_t popped = 0;
    std::int32_t top = AtomicWord(layer.replacement->free).load(cuda::memory_order_relaxed);
    if (top > 0) {
      // Others may have emptied the stack since; nobody pushes in this launch, so what is below zero is nothing.
      top = atomicSub(&layer.replacement->free, needed);
      popped = top < needed ? (top > 0 ? top : 0) : needed;
      if (popped < needed) {
        atomicMax(&layer.replacement->free, 0);
      }
    }
    shared.first = top;
    shared.popped = shared.given = popped;
  }
  __syncthreads();
  for (std::int32_t i = thread; i < shared.given; i += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t slot = layer.free_slots[shared.first - 1 - i];
    assign(layer, slot, rows[i]);
    slots[i] = slot;
  }
  __syncthreads();
  std::int32_t given = shared.given;
  if (given == needed) {
    return 0;
  }

  const std::int32_t window = window_slots(needed - given, layer.slots);
  const std::int32_t planned = planned_windows(needed - given, window);
  const std::int32_t most = planned + (layer.slots + window - 1) / window;
  bool again = false;
  for (std::int32_t turn = 0; turn < most && given < needed; turn += again ? 0 : 1) {
    const std::int32_t left = needed - given;
    const std::int32_t quota = turn < planned ? (left + planned - turn - 1) / (planned - turn) : left;
    if (thread <= kColdest) {
      shared.histogram[thread] = 0;
    }
    if (thread == 0) {
      if (turn > planned) {
        // Other blocks move the hand, too: a turn that has to be complete goes on from the window before.
        const std::int64_t next = static_cast<std::int64_t>(shared.first) + (again ? 0 : window);
        shared.first = static_cast<std::int32_t>(next < layer.slots ? next : next - layer.slots);
      } else if (!again) {
        // The hand counts on; as an unsigned number it wraps where nobody minds.
        auto* hand = reinterpret_cast<std::uint32_t*>(&layer.replacement->hand);
        const std::uint32_t first = atomicAdd(hand, static_cast<std::uint32_t>(window));
        shared.first = static_cast<std::int32_t>(first % static_cast<std::uint32_t>(layer.slots));
      }
      shared.oldest = 1;
      shared.farthest = 0;
    }
    __syncthreads();

    const std::int64_t passed = static_cast<std::int64_t>(shared.first) + thread;
    const auto slot = static_cast<std::int32_t>(passed < layer.slots ? passed : passed - layer.slots);
    std::int32_t stamp = now;
    if (thread < window) {
      stamp = stamp_word(layer, slot).load(cuda::memory_order_relaxed);
    }
    bool chosen = stamp != kFree && stamp < now;
    Candidate candidate{kNotScored, 1};
    if (chosen) {
      candidate = {scores.distance(host_word(layer, slot).load(cuda::memory_order_relaxed)), now - stamp};
      if (candidate.distance >= 0.0F) {
        atomicMax(&shared.farthest, __float_as_int(candidate.distance));
      }
      atomicMax(&shared.oldest, candidate.age);
    }
    __syncthreads();
    const std::int32_t level = kColdest - coldness(candidate, __int_as_float(shared.farthest), shared.oldest);
    if (chosen) {
      atomicAdd(shared.histogram + level, 1);
    }
    __syncthreads();
    if (warp_index() == 0) {
      find_edge(shared, quota);
    }
    __syncthreads();
    chosen = chosen && (level < shared.edge || (level == shared.edge && atomicSub(&shared.at_edge, 1) > 0));
    const bool taken = chosen && evict(layer, slot, stamp);
    if (taken) {
      const std::int32_t mine = atomicAdd(&shared.given, 1);
      assign(layer, slot, rows[mine]);
      slots[mine] = slot;
    }
    // On the last turn nothing may be passed over that this block could have: whoever was beaten to a slot looks again.
    again = __syncthreads_or(chosen && !taken) != 0 && turn >= planned;
    given = shared.given;
  }
  for (std::int32_t i = given + thread; i < needed; i += static_cast<std::int32_t>(blockDim.x)) {
    slot_word(layer, rows[i]).store(failed_at(now), cuda::memory_order_relaxed);
    slots[i] = kNone;
  }
  return given - shared.popped;
}

/// Publishes the rows that claim_slots found slots for; behind a barrier. The last threads of the block do it: their
/// fence waits for what they have loaded, and where there is little to fetch they have loaded nothing.
__device__ inline void publish_slots(const LayerView& layer, std::int32_t now, const std::int32_t* rows,
                                     const std::int32_t* slots, std::int32_t given) {
  for (std::int32_t i = static_cast<std::int32_t>(blockDim.x - 1U - threadIdx.x); i < given;
       i += static_cast<std::int32_t>(blockDim.x)) {
    publish(layer, slots[i], rows[i], now);
  }
}

}  // namespace echo
