#include "reference/cache_ops.hpp"

#include <algorithm>
#include <string>

#include "echo/errors.hpp"

namespace echo {
namespace {

/// Passes over the slots from the clock hand on, and stops at those that may be taken: for one turn
/// at those up to the age limit, for a second one at any that this tick has not stamped.
class ClockScan {
 public:
  ClockScan(const LayerView& layer, std::int32_t tick, std::int32_t needed)
      : layer_(layer),
        newest_(tick - 1),
        limit_(age_limit(*layer.replacement, layer.slots, tick, needed)),
        left_(layer.slots) {}

  /// kNone after the second turn.
  std::int32_t next() {
    std::int32_t& hand = layer_.replacement->hand;
    for (;;) {
      for (; left_ > 0; --left_) {
        const std::int32_t slot = hand;
        hand = slot + 1 == layer_.slots ? 0 : slot + 1;
        if (may_take(layer_.stamp[slot], limit_)) {
          --left_;
          return slot;
        }
      }
      if (limit_ == newest_) {
        return kNone;
      }
      limit_ = newest_;
      left_ = layer_.slots;
    }
  }

 private:
  const LayerView& layer_;
  std::int32_t newest_;
  std::int32_t limit_;
  std::int32_t left_;  ///< slots of this turn
};

[[noreturn]] void refuse(const LayerView& layer, std::size_t wanted, std::int32_t takeable) {
  throw StateError("gpu_slots: " + std::to_string(wanted) + " slots wanted, but of " +
                   std::to_string(layer.slots) + " only " + std::to_string(takeable) +
                   " are not in use by this step");
}

}  // namespace

void CacheOps::begin(std::int32_t tick) {
  ReplacementState& state = *layer_.replacement;
  if (tick < 1 || tick < state.last_tick) {
    throw StateError("tick: " + std::to_string(tick) + " given after " +
                     std::to_string(state.last_tick));
  }
  advance_window(state, tick);
  tick_ = tick;
}

void CacheOps::allocate(std::span<const std::int32_t> host_rows) {
  if (host_rows.empty()) {
    return;
  }
  // The histogram knows how many slots this tick has stamped, so whether there is room is clear
  // before any slot is touched; then the scan finds them in two turns at most.
  const std::int32_t takeable = layer_.slots - layer_.replacement->recent[tick_ % kWindow];
  if (host_rows.size() > static_cast<std::size_t>(std::max(takeable, 0))) {
    refuse(layer_, host_rows.size(), takeable);
  }
  ClockScan scan(layer_, tick_, static_cast<std::int32_t>(host_rows.size()));
  for (const std::int32_t row : host_rows) {
    const std::int32_t slot = scan.next();
    if (slot == kNone) {
      refuse(layer_, host_rows.size(), takeable);
    }
    evict(slot);
    layer_.slot_of[row] = slot;
    layer_.host_of[slot] = row;
    restamp(slot, tick_);
    ++layer_.replacement->used;
  }
}

void CacheOps::evict(std::int32_t slot) {
  const std::int32_t row = layer_.host_of[slot];
  if (row != kNone) {
    release(row);
    ++layer_.counters->evictions;
  }
}

void CacheOps::release(std::int32_t host_row) {
  const std::int32_t slot = layer_.slot_of[host_row];
  if (slot == kNone) {
    return;
  }
  layer_.slot_of[host_row] = kNone;
  layer_.host_of[slot] = kNone;
  restamp(slot, kFree);
  --layer_.replacement->used;
}

void CacheOps::restamp(std::int32_t slot, std::int32_t stamp) {
  ReplacementState& state = *layer_.replacement;
  std::int32_t& current = layer_.stamp[slot];
  if (in_window(current, state.last_tick)) {
    --state.recent[current % kWindow];
  }
  if (in_window(stamp, state.last_tick)) {
    ++state.recent[stamp % kWindow];
  }
  current = stamp;
}

}  // namespace echo
