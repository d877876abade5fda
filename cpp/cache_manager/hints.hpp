#pragma once
// Hints: slots that new rows of the next step may take (replacement.hpp says which). Shared by CPU and GPU code.
//
// A hint is a slot and the stamp that it had: it holds as long as the slot has it still. Hints need no memory: they lie
// where the stack of free slots lies, and are of use only while that is empty. A word of a hint's slot is its
// complement, which no word of the stack is, so that what was on the stack is no hint. Two words that were written by
// different threads make a hint that does not hold, or one that does no harm.

#include <cstdint>

#include "cache_manager/layer_view.hpp"

namespace echo {

struct Hint {
  std::int32_t slot;  ///< kNone: there is none
  std::int32_t stamp;

  /// Whether a slot that has `stamp_now` may be taken in tick `now`.
  ECHO_HOST_DEVICE bool holds(std::int32_t stamp_now, std::int32_t now) const {
    return stamp_now == stamp && stamp != kFree && stamp < now;
  }
};

/// Those of one layer.
struct Hints {
  std::int32_t count;
  std::int32_t* slots;
  std::int32_t* stamps;

  ECHO_HOST_DEVICE explicit Hints(const LayerView& layer)
      : count(layer.slots / 2 < kHints ? layer.slots / 2 : kHints), slots(layer.free_slots), stamps(slots + count) {}

  ECHO_HOST_DEVICE Hint read(std::int32_t index, const LayerView& layer) const {
    const Hint hint{~slots[index], stamps[index]};
    return hint.slot < layer.slots ? hint : Hint{kNone, kFree};
  }
  /// Only while the stack is empty, and nobody reads from it what was popped.
  ECHO_HOST_DEVICE void leave(std::int32_t index, const Hint& hint) const {
    slots[index] = ~hint.slot;
    stamps[index] = hint.stamp;
  }
};

}  // namespace echo
