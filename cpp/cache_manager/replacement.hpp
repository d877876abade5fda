#pragma once
// The replacement rule, shared by CPU and GPU code: sampled eviction of what the indexer wants least.
//
// Free slots lie on a stack and go first: while everything fits, nothing is evicted. Otherwise a caller that needs
// slots looks at a window of the pool, and gives away the coldest slots of it. How cold a slot is follows from the
// scores of this very step: the indexer has just scored every token, and a row far below the k-th score is unlikely to
// be selected soon. Rows that were not scored (their session is not in the batch, or the model reuses a selection) go
// by age. Both are scaled by the extremes of the window, so there is nothing to tune: coldness 0 ... kColdest in equal
// steps. A slot stamped in the current tick or later is never taken: it is selected, or new, in this very call. On the
// CPU one caller looks behind a hand that goes round, at kSpread slots for each that it needs; of equally cold slots
// those that the hand reaches first go. On a GPU every thread block looks at a window of its own (claim_slots.cuh).
// Cost: O(slots needed) on the CPU, a window per block on a GPU, whatever the size of the pool (the ECHO paper sorts
// the pool: half of its management time). Ticks start at 1 and never go back; a layer may skip some. A row that was
// fetched ahead (by a prefetch for the step under way, by a forecast for the next one) has a stamp below kFree until it
// is used: once it has had its chance it counts as older than it is, so that wrong guesses go before what was once of
// use.
//
// New rows of a step need slots before it is scored. For them the last call that gave slots away leaves hints
// (hints.hpp): of its last window those slots that would have gone next, unless only a few were left, which are nearly
// selected; then, where rows were scored, those that it has just fetched, the lowest score first. In a pool that holds
// little more than a selection there is nothing else: what came to it last, and barely, is the first to leave it. A
// hint holds until its slot is used.

#include <cstdint>

#include "cache_manager/address.hpp"

namespace echo {

inline constexpr std::int32_t kFree = -1;        ///< stamp of a slot that holds no row
inline constexpr std::int32_t kUnusedAge = 128;  ///< added to the age of a row that was fetched ahead and never used
inline constexpr std::int32_t kColdest = 63;     ///< coldness of what goes first
inline constexpr std::int32_t kWindow = 512;     ///< slots that are looked at together, at most (CPU)
inline constexpr std::int32_t kSpread = 32;      ///< slots looked at for each that is needed ...
inline constexpr std::int32_t kLeastSpread = 8;  ///< ... and the fewest, where many are needed
inline constexpr std::int32_t kWindowGrain = 32;
inline constexpr std::int32_t kHints = 64;  ///< that a layer keeps, at most
/// Slots of a window that may go and do not, for hints to be among them.
inline constexpr std::int32_t kLeastLeft = 4;
/// A call within so many ticks of one in which rows were missing does something about it ahead: misses come in nearly
/// every step or in none for long.
inline constexpr std::int32_t kExpectMisses = 8;

struct alignas(8) ReplacementState {
  std::int32_t hand;         ///< where the next window begins (CPU)
  std::uint32_t copied = 0;  ///< blocks of the call under way that have copied their rows (GPU), 0 between calls
  // On a GPU these two are read together, as one word.
  std::int32_t free;           ///< slots on the stack of free ones
  std::int32_t popped = 0;     ///< latest tick in which a recall found some there, and may have taken them (GPU)
  std::int32_t missed = 0;     ///< latest tick in which rows were missing, or had been until score (GPU)
  std::int32_t nan_codes = 0;  ///< 1 once a row with a NaN code has come to a slot (GPU): nan_codes.cuh
  /// Rows that the last score with prefetch asked for (GPU). Score writes it while others of its thread blocks may
  /// still begin; all have to see the same number, so they read `expected`, to which recall copies it.
  std::int32_t asked = 0;
  std::int32_t expected = 0;
};

inline constexpr std::int32_t kLastTick = (1 << 30) - 2;  ///< there are two stamps of what is fetched ahead in each
inline constexpr std::int32_t kStepTicks = 2;             ///< of a decode step: its own, and that of its new rows

/// Stamp of a row that was prefetched in this tick and has not been used.
ECHO_HOST_DEVICE std::int32_t prefetched_at(std::int32_t tick) { return kFree - 1 - 2 * tick; }
/// Stamp of a row that was forecast in this tick and has not been used.
ECHO_HOST_DEVICE std::int32_t forecast_at(std::int32_t tick) { return kFree - 2 - 2 * tick; }
ECHO_HOST_DEVICE bool is_forecast(std::int32_t stamp) { return stamp < kFree && (stamp & 1) != 0; }
/// Tick of a stamp below kFree.
ECHO_HOST_DEVICE std::int32_t fetched_at(std::int32_t stamp) { return (kFree - 1 - stamp) >> 1; }

/// On a GPU, stamp of a row that a pass appends, from its begin on: later than what the pass stamps, and before the
/// next one.
ECHO_HOST_DEVICE std::int32_t new_row_at(std::int32_t tick) { return tick + 1; }

/// Age of a slot that is not free in a later tick, at least 1.
ECHO_HOST_DEVICE std::int32_t age_of(std::int32_t stamp, std::int32_t now) {
  if (stamp > kFree) {
    return now - stamp;
  }
  const std::int32_t age = now - fetched_at(stamp);
  return is_forecast(stamp) && age <= kStepTicks ? age : age + kUnusedAge;
}

/// Whether a slot may be given to a row that is fetched ahead: not one that the same call has fetched ahead.
ECHO_HOST_DEVICE bool yields_ahead(std::int32_t stamp, std::int32_t now) {
  return stamp != kFree && stamp < now && stamp != prefetched_at(now);
}

/// Slots of a window for a call that needs `needed` of them (at least 1); no more than the pool has.
ECHO_HOST_DEVICE std::int32_t window_slots(std::int32_t needed, std::int32_t slots) {
  const std::int32_t wanted = needed >= kWindow / kSpread ? kWindow : needed * kSpread;
  const std::int32_t window = wanted < 2 * kWindowGrain ? 2 * kWindowGrain : wanted;
  return window < slots ? window : slots;
}

/// Windows over which a call that needs `needed` slots spreads them: at most one in kLeastSpread of each. If they do
/// not yield enough, it goes on for one turn of the pool and takes every slot that may be taken.
ECHO_HOST_DEVICE std::int32_t planned_windows(std::int32_t needed, std::int32_t window) {
  const std::int32_t share = window < kLeastSpread ? 1 : window / kLeastSpread;
  return (needed - 1) / share + 1;
}

/// What is known of a slot that may be taken.
struct Candidate {
  float distance;    ///< k-th score of its session's query minus its own score, at least 0; negative: not scored
  std::int32_t age;  ///< ticks since its last use, at least 1
};

/// Distance of a scored row that is so far below the k-th score; NaN scores are the farthest.
ECHO_HOST_DEVICE float score_distance(float below_kth) {
  return below_kth >= 0.0F ? below_kth : (below_kth < 0.0F ? 0.0F : 3.0e38F);
}
ECHO_HOST_DEVICE float score_distance(float kth, float score) { return score_distance(kth - score); }

/// How cold a candidate is, where `farthest` and `oldest` are the largest distance and the largest age among the
/// candidates of its window. Ages of scored rows count, too: what was just used is not cold for being the only one that
/// was not scored.
ECHO_HOST_DEVICE std::int32_t coldness(const Candidate& candidate, float farthest, std::int32_t oldest) {
  if (candidate.distance >= 0.0F) {
    if (candidate.distance >= farthest) {
      return kColdest;
    }
    return static_cast<std::int32_t>(candidate.distance / farthest * static_cast<float>(kColdest));
  }
  return static_cast<std::int32_t>(static_cast<float>(candidate.age) / static_cast<float>(oldest) *
                                   static_cast<float>(kColdest));
}

}  // namespace echo
