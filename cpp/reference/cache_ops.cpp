#include "reference/cache_ops.hpp"

#include <string>

#include "echo/errors.hpp"

namespace echo {

void CacheOps::begin(std::int32_t tick) {
  ReplacementState& state = *layer_.replacement;
  if (tick < 1 || tick < state.last_tick) {
    throw StateError("tick: " + std::to_string(tick) + " given after " + std::to_string(state.last_tick));
  }
  advance_window(state, tick);
  tick_ = tick;
}

void CacheOps::allocate(std::span<const std::int32_t> host_rows) {
  if (host_rows.empty()) {
    return;
  }
  // The histogram knows how many slots this tick has stamped, so whether there is room is clear
  // before any slot is touched. And it has counted at least as many slots up to the age limit as
  // are needed: one turn finds them.
  const std::int32_t takeable = layer_.slots - layer_.replacement->recent[tick_ % kWindow];
  const auto needed = static_cast<std::int64_t>(host_rows.size());
  if (needed > takeable) {
    throw StateError("gpu_slots: " + std::to_string(needed) + " slots wanted, but of " + std::to_string(layer_.slots) +
                     " only " + std::to_string(takeable) + " are not in use by this step");
  }
  const std::int32_t limit = age_limit(*layer_.replacement, layer_.slots, tick_, static_cast<std::int32_t>(needed));
  std::int32_t left = layer_.slots;
  for (const std::int32_t row : host_rows) {
    const std::int32_t slot = next_victim(limit, left);
    evict(slot);
    layer_.slot_of[row] = slot;
    layer_.host_of[slot] = row;
    restamp(slot, tick_);
    ++layer_.replacement->used;
  }
}

std::int32_t CacheOps::next_victim(std::int32_t limit, std::int32_t& left) {
  std::int32_t& hand = layer_.replacement->hand;
  for (; left > 0; --left) {
    const std::int32_t slot = hand;
    hand = slot + 1 == layer_.slots ? 0 : slot + 1;
    if (may_take(layer_.stamp[slot], limit)) {
      --left;
      return slot;
    }
  }
  throw StateError("replacement: the stamps of a layer do not agree with their histogram");
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
