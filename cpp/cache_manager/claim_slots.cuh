#pragma once
// claim_slots: the replacement rule (replacement.hpp), by half of a block for the rows that the other half has to
// fetch, or by a block of begin for new rows. Any number of blocks may do so at the same time; each begins at a place
// of its own in the pool.
//
// Free slots are popped together. Then, window by window: a thread per slot reads stamp and host row (coalesced) and
// the row's score (two dependent loads, mostly from the L2 cache), a histogram of coldness in shared memory says down
// to which level slots go, and those threads claim theirs by compare-and-swap. The first window is looked at and sorted
// into its histogram ahead, while the other half looks rows up: what is left to do when rows are listed is to find the
// level and to claim. Who loses a slot to another block leaves a gap that a later window fills.
//
// Behind the planned windows the block makes one turn of the pool for whatever may be taken; a slot that was passed
// then can never be taken again within the call, so one turn proves that none is left. Before that it makes one that
// spares rows at or above the k-th score, as the planned windows do: blocks that have yet to begin will look them up.
// The CPU's hand is a number that is kept; here it follows from tick and block, so that no block waits to read it. The
// claimers do not touch host memory before they are done: what waits for the link would hold them up. On an H200 a call
// of one session with 41 misses takes 5.2 us; when it took 5.5, it was 7.4 with nothing looked at ahead.

#include "cache_manager/free_stack.cuh"
#include "cache_manager/residency.cuh"
#include "cache_manager/row_scores.hpp"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr std::int32_t kClaimers = 256;    ///< threads that claim slots, the last ones of a block
inline constexpr std::int32_t kClaimBarrier = 1;  ///< theirs
inline constexpr std::int32_t kMostPlanned = 2;   ///< windows that a call with many misses spreads them over

inline constexpr std::int32_t kNoClaimer = 0x7FFFFFFF;

/// A slot as a thread saw it.
struct Sight {
  std::int32_t slot = kNone;  ///< kNone: may not be taken
  std::int32_t stamp = 0;
  std::int32_t row = kNone;
  Candidate candidate{kNotScored, 1};
  std::int32_t level = 0;  ///< of the histogram
};

/// Where the windows of a block lie.
struct ClaimPlace {
  std::int32_t first;   ///< slot of the first window
  std::int32_t window;  ///< slots of a window, at most kClaimers
};

/// Shared memory of claim_slots.
struct ClaimShared {
  std::int32_t free;  ///< slots on the stack, before and after the block has popped its own
  std::int32_t top;
  bool hints;           ///< the stack is empty, and no block of this launch reads what it took from there
  std::int32_t given;   ///< rows that have a slot
  std::int32_t popped;  ///< rows that have a slot which was free
  std::int32_t oldest;
  std::int32_t farthest;                 ///< bits of a float that is not negative: they compare like integers
  std::int32_t at_edge;                  ///< threads that asked for a slot of the last level that goes
  std::int32_t left;                     ///< slots of the window that nobody asked for ...
  std::int32_t coldest;                  ///< ... and of them the coldest: level and claimer
  std::int32_t histogram[kColdest + 1];  ///< coldest first
};

/// The place of block `block` of `blocks` in tick `now`: blocks share the pool evenly, and begin elsewhere in each
/// tick, so that no session's misses keep falling on the same slots.
__device__ inline ClaimPlace claim_place(const LayerView& layer, std::int32_t now, std::int32_t block,
                                         std::int32_t blocks) {
  constexpr std::uint32_t kScatter = 0x9E3779B1U;  // 2^32 / golden ratio: consecutive ticks lie far apart
  const auto slots = static_cast<std::uint32_t>(layer.slots);
  const std::uint32_t share = max(slots / static_cast<std::uint32_t>(blocks), min(slots, std::uint32_t{kWindowGrain}));
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

/// Whether it may be taken.
__device__ inline bool may_go(const Sight& sight, std::int32_t now) {
  return sight.stamp != kFree && sight.stamp < now && sight.row >= 0;
}

__device__ inline Sight look_at(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                const ClaimPlace& place, std::uint32_t passed) {
  Sight sight = read_slot(layer, place, passed);
  if (may_go(sight, now)) {
    sight.candidate = {scores.distance(sight.row), age_of(sight.stamp, now)};
  } else {
    sight.slot = kNone;
  }
  return sight;
}

/// Sorts what the claimers see into the histogram, which is complete behind a barrier of theirs. `spares`: rows at or
/// above the k-th score are passed over.
__device__ inline void sort_window(std::int32_t claimer, bool spares, Sight& sight, ClaimShared& shared) {
  if (claimer <= kColdest) {
    shared.histogram[claimer] = 0;
  }
  if (claimer == 0) {
    shared.oldest = 1;
    shared.farthest = 0;
    shared.at_edge = 0;
    shared.left = 0;
    shared.coldest = kNoClaimer;
  }
  meet(kClaimBarrier, kClaimers);
  if (spares && sight.candidate.distance == 0.0F) {
    sight.slot = kNone;
  }
  const bool seen = sight.slot != kNone;
  const std::int32_t distance = seen ? max(0, __float_as_int(sight.candidate.distance)) : 0;
  const std::int32_t farthest = __reduce_max_sync(kAllLanes, distance);
  const std::int32_t oldest = __reduce_max_sync(kAllLanes, seen ? sight.candidate.age : 1);
  if (lane_index() == 0) {
    atomicMax(&shared.farthest, farthest);
    atomicMax(&shared.oldest, oldest);
  }
  meet(kClaimBarrier, kClaimers);
  sight.level = kColdest - coldness(sight.candidate, __int_as_float(shared.farthest), shared.oldest);
  if (seen) {
    atomicAdd(shared.histogram + sight.level, 1);
  }
}

/// What a claimer knows of its layer before it knows k-th scores.
struct FirstLook {
  FreeStack stack;
  Sight sight = {};     ///< of the first window; nothing, if the layer has not needed slots lately
  RowScore score = {};  ///< of its row
};

/// May come before the kernel ahead of the launch has ended: what that may still change is a guess here. `expected`:
/// slots will be needed. All of it is under way together, but for the row's score.
__device__ inline FirstLook look_first(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                       const ClaimPlace& place, std::int32_t claimer, bool expected) {
  const std::int32_t missed = AtomicWord(layer.replacement->missed).load(cuda::memory_order_relaxed);
  FirstLook look{.stack = FreeStack(layer)};
  if (claimer < place.window) {
    look.sight = read_slot(layer, place, static_cast<std::uint32_t>(claimer));
  }
  if (look.sight.slot != kNone && may_go(look.sight, now) && (expected || now - missed <= kExpectMisses)) {
    look.score = scores.find(look.sight.row);
  } else {
    look.sight = {};
  }
  return look;
}

/// What a claimer sees of the first window, sorted. What it leaves in shared memory is to be used behind a barrier.
__device__ inline Sight look_ahead(const FirstLook& look, const RowScores& scores, std::int32_t now,
                                   std::int32_t claimer, ClaimShared& shared) {
  Sight sight = look.sight;
  if (sight.slot != kNone) {
    sight.candidate = {scores.distance(look.score), age_of(sight.stamp, now)};
  }
  if (claimer == 0) {
    shared.free = look.stack.free;
    shared.hints = look.stack.free <= 0 && look.stack.popped != now;
    shared.given = 0;
  }
  sort_window(claimer, /*spares=*/true, sight, shared);
  return sight;
}

/// Down to which level of the histogram `quota` slots go.
struct Edge {
  std::int32_t level;
  std::int32_t at_level;  ///< slots of that level which go
  std::int32_t seen;      ///< slots of all levels
};

/// By each warp that asks.
__device__ inline Edge find_edge(const ClaimShared& shared, std::int32_t quota) {
  static_assert(kColdest + 1 == 2 * kWarp);
  const std::int32_t first = shared.histogram[2 * lane_index()];
  const std::int32_t both = first + shared.histogram[2 * lane_index() + 1];
  const std::int32_t sum = inclusive_warp_sum(both);
  const std::int32_t seen = __shfl_sync(kAllLanes, sum, kWarp - 1);
  const std::int32_t before = sum - both;
  const bool in_first = quota <= before + first;
  const std::int32_t level = 2 * lane_index() + (in_first ? 0 : 1);
  const std::int32_t at_level = quota - before - (in_first ? 0 : first);
  const unsigned here = __ballot_sync(kAllLanes, before < quota && quota <= sum);
  if (here == 0U) {
    return {.level = kColdest, .at_level = kClaimers, .seen = seen};
  }
  const int lane = __ffs(static_cast<int>(here)) - 1;
  return {
      .level = __shfl_sync(kAllLanes, level, lane), .at_level = __shfl_sync(kAllLanes, at_level, lane), .seen = seen};
}

/// Takes slots down to the edge for rows[given...]. Returns whether another block was faster with one of them;
/// shared.given counts the rest. Behind it, claimers see what nobody asked for.
__device__ inline bool take_coldest(const LayerView& layer, Sight& sight, const Edge& edge, const std::int32_t* rows,
                                    std::int32_t* slots, ClaimShared& shared) {
  const bool chosen =
      sight.slot != kNone &&
      (sight.level < edge.level || (sight.level == edge.level && atomicAdd(&shared.at_edge, 1) < edge.at_level));
  const bool taken = chosen && evict(layer, sight.slot, sight.stamp, sight.row);
  if (taken) {
    const std::int32_t mine = atomicAdd(&shared.given, 1);
    assign(layer, sight.slot, rows[mine]);
    slots[mine] = sight.slot;
  }
  sight.slot = chosen ? kNone : sight.slot;
  return meet_or(kClaimBarrier, kClaimers, chosen && !taken);
}

/// Gives slots to rows[0, needed), which the block's other threads found missing (look_up returned kNone) and listed in
/// shared memory: slots[0, shared.given); where there are no more, the other rows are marked, and their slots left as
/// they are. Called by the claimers, 0 to kClaimers - 1, with what each saw ahead, behind a barrier of the block; slots
/// are to be read behind another. `sight` is what each saw last and nobody asked for, then. Returns how many rows were
/// evicted.
__device__ inline std::int32_t claim_slots(const LayerView& layer, const RowScores& scores, std::int32_t now,
                                           const ClaimPlace& place, std::int32_t claimer, Sight& sight,
                                           const std::int32_t* rows, std::int32_t* slots, std::int32_t needed,
                                           ClaimShared& shared) {
  std::int32_t popped = 0;
  if (shared.free > 0) {
    if (claimer == 0) {
      shared.top = pop_free(layer, needed);
      shared.popped = shared.given = min(max(shared.top, 0), needed);
    }
    meet(kClaimBarrier, kClaimers);
    popped = shared.popped;
    for (std::int32_t i = claimer; i < popped; i += kClaimers) {
      const std::int32_t slot = layer.free_slots[shared.top - 1 - i];
      assign(layer, slot, rows[i]);
      slots[i] = slot;
    }
    meet(kClaimBarrier, kClaimers);
  }

  const std::int32_t window = place.window;
  std::int32_t given = popped;
  // Where much is missing, being choosy would leave the link idle.
  const std::int32_t planned = min(planned_windows(max(needed - given, 1), window), kMostPlanned);
  const std::int32_t turn_of_pool = (layer.slots - 1) / window + 1;
  const std::int32_t spared = planned + turn_of_pool;
  bool sorted = true;
  for (std::int32_t turn = 0; turn < spared + turn_of_pool && given < needed;) {
    if (!sorted) {
      sight = {};
      if (claimer < window) {
        const auto passed = static_cast<std::uint32_t>(turn) * static_cast<std::uint32_t>(window);
        sight = look_at(layer, scores, now, place, passed + static_cast<std::uint32_t>(claimer));
      }
      sort_window(claimer, turn < spared, sight, shared);
      meet(kClaimBarrier, kClaimers);
    }
    const std::int32_t left = needed - given;
    const Edge edge = find_edge(shared, turn < planned ? (left - 1) / (planned - turn) + 1 : left);
    if (sorted && edge.seen == 0) {  // nothing was looked at ahead
      meet(kClaimBarrier, kClaimers);
    } else {
      // Behind the planned windows nothing may be passed over that this block could have: whoever was beaten to a slot
      // looks again.
      const bool beaten = take_coldest(layer, sight, edge, rows, slots, shared);
      given = shared.given;
      turn += beaten && turn >= planned ? 0 : 1;
    }
    sorted = false;
  }
  for (std::int32_t i = given + claimer; i < needed; i += kClaimers) {
    slot_word(layer, rows[i]).store(failed_at(now), cuda::memory_order_relaxed);
  }
  return given - popped;
}

/// Publishes the rows that claim_slots found slots for, with this stamp. By the claimers, behind a barrier.
__device__ inline void publish_slots(const LayerView& layer, std::int32_t stamp, std::int32_t claimer,
                                     const std::int32_t* rows, const std::int32_t* slots, std::int32_t given) {
  for (std::int32_t i = claimer; i < given; i += kClaimers) {
    publish(layer, slots[i], rows[i], stamp);
  }
}

}  // namespace echo
