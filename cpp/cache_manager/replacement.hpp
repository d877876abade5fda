#pragma once
// The replacement rule, shared by CPU and GPU code.
//
// Every slot carries a stamp: the tick of the layer call that used it last, kFree if it holds nothing. A victim
// is found by a clock hand that goes round the pool and takes the first slot whose stamp is at most `limit`.
// The limit comes from a histogram of stamps: `recent[t % kWindow]` counts the slots last used at tick t, for the
// last kWindow ticks. Going from the oldest tick to the newest, the limit is the first at which
// max(needed, slots / kSpread) slots qualify, so victims are among the oldest 1/kSpread of the pool (LRU up to
// that grain), and the hand passes about kSpread slots per victim: O(misses), not O(pool).
// A slot stamped in the current tick is never taken: it is selected, or new, in this very call.
// Ticks start at 1 and never go back; a layer may skip some.

#include <cstdint>

#include "cache_manager/address.hpp"

namespace echo {

inline constexpr std::int32_t kFree = -1;     ///< stamp of a slot that holds no row
inline constexpr std::int32_t kWindow = 256;  ///< ticks the histogram tells apart
inline constexpr std::int32_t kSpread = 16;

struct ReplacementState {
  std::int32_t hand;             ///< next slot the clock looks at
  std::int32_t used;             ///< slots that hold a row
  std::int32_t last_tick;        ///< newest tick the histogram knows
  std::int32_t recent[kWindow];  ///< slots by tick of last use, for ticks in (now - kWindow, now]
};

/// Whether a slot with this stamp may be given another row.
ECHO_HOST_DEVICE bool may_take(std::int32_t stamp, std::int32_t limit) { return stamp <= limit; }

/// Moves the window up to tick `now`: counts of ticks that fall out of it are dropped (those slots are "old").
ECHO_HOST_DEVICE void advance_window(ReplacementState& state, std::int32_t now) {
  const std::int32_t first = state.last_tick + 1 > now - kWindow ? state.last_tick + 1 : now - kWindow + 1;
  for (std::int32_t tick = first; tick <= now; ++tick) {
    state.recent[tick % kWindow] = 0;
  }
  state.last_tick = now;
}

/// Whether the histogram counts a slot with this stamp at tick `now`.
ECHO_HOST_DEVICE bool in_window(std::int32_t stamp, std::int32_t now) {
  return stamp != kFree && stamp > now - kWindow;
}

/// Newest stamp that may be taken at tick `now` when `needed` slots are wanted; always < now.
/// Free slots count as oldest. Call after advance_window(state, now).
ECHO_HOST_DEVICE std::int32_t age_limit(const ReplacementState& state, std::int32_t slots, std::int32_t now,
                                        std::int32_t needed) {
  const std::int32_t wanted = needed > slots / kSpread ? needed : slots / kSpread;
  std::int32_t counted = 0;
  for (std::int32_t i = 0; i < kWindow; ++i) {
    counted += state.recent[i];
  }
  std::int32_t found = slots - counted;  // free, or older than the window
  std::int32_t limit = now - kWindow > kFree ? now - kWindow : kFree;
  while (found < wanted && limit < now - 1) {
    ++limit;
    found += state.recent[limit % kWindow];
  }
  return limit;
}

}  // namespace echo
