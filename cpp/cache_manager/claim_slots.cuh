#pragma once
// claim_slots: the replacement rule (replacement.hpp), by half of a block for the rows that the other half has to
// fetch, or by a block of begin for new rows. Any number of blocks may do so at the same time; each begins at a place
// of its own in the pool.
//
// Free slots are popped together. Then, window by window: a thread per slot reads stamp and host row (coalesced) and
// the row's score (two dependent loads, mostly from the L2 cache), a histogram of coldness in shared memory says down
// to which level slots go, and those threads claim theirs by compare-and-swap. The first window is looked at ahead,
// while the other half looks rows up: the chain of loads is longer than all the rest. Who loses a slot to another block
// leaves a gap that a later window fills. Behind the planned windows the block makes one turn of the pool for whatever
// may be taken; a slot that was passed then can never be taken again within the call, so one turn proves that none is
// left. The CPU's hand is a number that is kept; here it follows from tick and block, so that no block waits to read
// it. The claimers do not touch host memory before they are done: what waits for the link would hold them up. Cost on
// an H200: 2 us from the list of missing rows to their slots, for a window that was looked at ahead.

#include "cache_manager/residency.cuh"
#include "cache_manager/row_scores.hpp"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr std::int32_t kClaimers = 256;    ///< threads that claim slots, the last ones of a block
inline constexpr std::int32_t kClaimBarrier = 1;  ///< theirs
inline constexpr std::int32_t kMostPlanned = 2;   ///< windows that a call with many misses spreads them over
/// A call within so many ticks of one that needed slots looks ahead: misses come in nearly every step or in none for
/// long.
inline constexpr std::int32_t kExpectMisses = 4;

/// A slot as a thread saw it.
struct Sight {
  std::int32_t slot = kNone;  ///< kNone: may not be taken
  std::int32_t stamp = 0;
  std::int32_t row = kNone;
  Candidate candidate{kNotScored, 1};
};

/// Where the windows of a block lie.
struct ClaimPlace {
  std::int32_t first;   ///< slot of the first window
  std::int32_t window;  ///< slots of a window, at most kClaimers
};

/// Shared memory of claim_slots.
struct ClaimShared {
  std::int32_t free;    ///< slots on the stack
  std::int32_t given;   ///< rows that have a slot
  std::int32_t popped;  ///< rows that have a slot which was free
  std::int32_t oldest;
  std::int32_t farthest;                 ///< bits of a float that is not negative: they compare like integers
  std::int32_t edge;                     ///< the last level of the histogram that goes, some of it
  std::int32_t at_edge;                  ///< slots of that level which go
  std::int32_t histogram[kColdest + 1];  ///< coldest first
};

/// The place of block `block` of `blocks` in tick `now`: blocks share the pool evenly, and begin elsewhere in each
/// tick, so that no session's misses keep falling on the same slots.
__device__ inline ClaimPlace claim_place(const LayerView& layer, std::int32_t now, std::int32_t block,
                                         std::int32_t blocks) {
  constexpr std::uint32_t kScatter = 0x9E3779B1U;  // 2^32 / golden ratio: consecutive ticks lie far apart
  const auto slots = static_cast<std::uint32_t>(layer.slots);
  const std::uint32_t share = max(slots / static_cast<std::uint32_t>(blocks), min(slots, 2U * kWindowGrain));
  const std::uint32_t first =
      (static_cast<std::uint32_t>(now) * kScatter + static_cast<std::uint32_t>(block) * share) % slots;
  return {static_cast<std::int32_t>(first), static_cast<std::int32_t>(min(share, std::uint32_t{kClaimers}))};
}

/// What there is in the slot `passed` places behind the first of the windows, at most two turns of the pool.
__device__ inline Sight read_slot(const LayerView& layer, const ClaimPlace& place, std::uint32_t passed) {
  const auto slots = static_cast<std::uint32_t>(layer.slots);
  std::uint32_t slot = static_cast<std::uint32_t>(place.first) + passed % slots;
  slot -= slot < slots ? 0U : slots;
  Sight sight;
  sight.slot = static_cast<std::int32_t>(slot);
  sight.stamp = stamp_word(layer, sight.slot).load(cuda::memory_order_relaxed);
  sight.row = host_word(layer, sight.slot).load(cuda::memory_order_relaxed);
  return sight;
}

/// Whether it may be taken, and how cold it is.
__device__ inline void judge(const RowScores& scores, std::int32_t now, Sight& sight) {
  if (sight.stamp != kFree && sight.stamp < now && sight.row >= 0) {
    sight.candidate = {scores.distance(sight.row), age_of(sight.stamp, now)};
  } else {
    sight.slot = kNone;
  }
}

__device__ inline Sight look_at(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                const ClaimPlace& place, std::uint32_t passed) {
  Sight sight = read_slot(layer, place, passed);
  judge(scores, now, sight);
  return sight;
}

/// What a claimer sees of the first window: nothing, if the layer has not needed slots lately. Also reads how many
/// slots are free. All of that is under way together, and the first look of the block at its layer.
__device__ inline Sight look_ahead(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                   const ClaimPlace& place, std::int32_t claimer, ClaimShared& shared) {
  if (claimer >= place.window) {
    return {};
  }
  const std::int32_t missed = AtomicWord(layer.replacement->missed).load(cuda::memory_order_relaxed);
  const std::int32_t free = AtomicWord(layer.replacement->free).load(cuda::memory_order_relaxed);
  Sight sight = read_slot(layer, place, static_cast<std::uint32_t>(claimer));
  if (now - missed <= kExpectMisses) {
    judge(scores, now, sight);
  } else {
    sight = {};
  }
  if (claimer == 0) {
    shared.free = free;
  }
  return sight;
}

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
    shared.at_edge = kClaimers;
  }
  if (before < quota && quota <= sum) {
    const bool in_first = quota <= before + first;
    shared.edge = 2 * lane + (in_first ? 0 : 1);
    shared.at_edge = quota - before - (in_first ? 0 : first);
  }
}

/// Takes the `quota` coldest slots that the claimers see for rows[given...]. Returns whether another block was faster
/// with one of them; shared.given counts the rest.
__device__ inline bool take_coldest(const LayerView& layer, std::int32_t claimer, const Sight& sight,
                                    std::int32_t quota, const std::int32_t* rows, std::int32_t* slots,
                                    ClaimShared& shared) {
  if (claimer <= kColdest) {
    shared.histogram[claimer] = 0;
  }
  if (claimer == 0) {
    shared.oldest = 1;
    shared.farthest = 0;
  }
  meet(kClaimBarrier, kClaimers);
  const bool seen = sight.slot != kNone;
  const std::int32_t distance = seen ? max(0, __float_as_int(sight.candidate.distance)) : 0;
  const std::int32_t farthest = __reduce_max_sync(kAllLanes, distance);
  const std::int32_t oldest = __reduce_max_sync(kAllLanes, seen ? sight.candidate.age : 1);
  if (lane_index() == 0) {
    atomicMax(&shared.farthest, farthest);
    atomicMax(&shared.oldest, oldest);
  }
  meet(kClaimBarrier, kClaimers);
  const std::int32_t level = kColdest - coldness(sight.candidate, __int_as_float(shared.farthest), shared.oldest);
  if (seen) {
    atomicAdd(shared.histogram + level, 1);
  }
  meet(kClaimBarrier, kClaimers);
  if (claimer < kWarp) {
    find_edge(shared, quota);
  }
  meet(kClaimBarrier, kClaimers);
  const bool chosen = seen && (level < shared.edge || (level == shared.edge && atomicSub(&shared.at_edge, 1) > 0));
  const bool taken = chosen && evict(layer, sight.slot, sight.stamp, sight.row);
  if (taken) {
    const std::int32_t mine = atomicAdd(&shared.given, 1);
    assign(layer, sight.slot, rows[mine]);
    slots[mine] = sight.slot;
  }
  return meet_or(kClaimBarrier, kClaimers, chosen && !taken);
}

/// Gives slots to rows[0, needed), which the block's other threads found missing (look_up returned kNone) and listed in
/// shared memory: slots[0, shared.given); where there are no more, the other rows are marked, and their slots left as
/// they are. Called by the claimers, 0 to kClaimers - 1, with what each saw ahead, behind a barrier of the block; slots
/// are to be read behind another. Returns how many rows were evicted.
__device__ inline std::int32_t claim_slots(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                           const ClaimPlace& place, std::int32_t claimer, const Sight& ahead,
                                           const std::int32_t* rows, std::int32_t* slots, std::int32_t needed,
                                           ClaimShared& shared) {
  if (claimer == 0) {
    std::int32_t popped = 0;
    if (shared.free > 0) {
      // Others may have emptied the stack since; nobody pushes in this launch, so what is below zero is nothing.
      const std::int32_t top = atomicSub(&layer.replacement->free, needed);
      popped = top < needed ? max(top, 0) : needed;
      if (popped < needed) {
        atomicMax(&layer.replacement->free, 0);
      }
      shared.free = top;
    }
    shared.given = popped;
    shared.popped = popped;
  }
  meet(kClaimBarrier, kClaimers);
  for (std::int32_t i = claimer; i < shared.popped; i += kClaimers) {
    const std::int32_t slot = layer.free_slots[shared.free - 1 - i];
    assign(layer, slot, rows[i]);
    slots[i] = slot;
  }
  meet(kClaimBarrier, kClaimers);

  const std::int32_t window = place.window;
  // Where much is missing, being choosy would leave the link idle.
  const std::int32_t planned = min(planned_windows(max(needed - shared.given, 1), window), kMostPlanned);
  const std::int32_t most = planned + (layer.slots - 1) / window + 1;
  for (std::int32_t turn = 0; turn < most && shared.given < needed; ++turn) {
    const std::int32_t left = needed - shared.given;
    const std::int32_t quota = turn < planned ? (left - 1) / (planned - turn) + 1 : left;
    Sight sight = ahead;
    bool again = turn == 0 && !meet_or(kClaimBarrier, kClaimers, ahead.slot != kNone);
    do {
      if (turn > 0 || again) {
        sight = {};
        if (claimer < window) {
          const auto passed = static_cast<std::uint32_t>(turn) * static_cast<std::uint32_t>(window);
          sight = look_at(layer, scores, now, place, passed + static_cast<std::uint32_t>(claimer));
        }
      }
      again = take_coldest(layer, claimer, sight, min(quota, needed - shared.given), rows, slots, shared);
      // On the last turn nothing may be passed over that this block could have: whoever was beaten to a slot looks
      // again.
    } while (again && turn >= planned && shared.given < needed);
  }
  for (std::int32_t i = shared.given + claimer; i < needed; i += kClaimers) {
    slot_word(layer, rows[i]).store(failed_at(now), cuda::memory_order_relaxed);
  }
  return shared.given - shared.popped;
}

/// Publishes the rows that claim_slots found slots for, with this stamp. By the claimers, behind a barrier.
__device__ inline void publish_slots(const LayerView& layer, std::int32_t stamp, std::int32_t claimer,
                                     const std::int32_t* rows, const std::int32_t* slots, std::int32_t given) {
  for (std::int32_t i = claimer; i < given; i += kClaimers) {
    publish(layer, slots[i], rows[i], stamp);
  }
}

}  // namespace echo
