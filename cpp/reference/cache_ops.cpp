// The replacement rule (replacement.hpp) one slot after the other: the same calls leave the same
// state. Whether there is room shows only when all that may be taken has been looked at, so victims
// are chosen first and maps change afterwards. Cost: a window per `kSpread` slots needed and a sort
// of each; a whole turn of the pool only where that yields too little.
#include "reference/cache_ops.hpp"

#include <algorithm>
#include <string>

#include "echo/errors.hpp"

namespace echo {

void CacheOps::begin(std::int32_t tick) {
  if (tick < 1) {
    throw StateError("tick: " + std::to_string(tick) + " given, expected at least 1");
  }
  tick_ = tick;
}

void CacheOps::allocate(std::span<const std::int32_t> host_rows, const RowScores& scores) {
  ReplacementState& state = *layer_.replacement;
  const auto wanted = static_cast<std::int64_t>(host_rows.size());
  const auto from_stack = static_cast<std::size_t>(std::min<std::int64_t>(wanted, state.free));
  const std::span<const std::int32_t> others = host_rows.subspan(from_stack);

  const std::int32_t hand = state.hand;
  // More than the pool has are as impossible as one more than it has.
  const auto needed = static_cast<std::int32_t>(std::min<std::int64_t>(std::ssize(others), layer_.slots + 1LL));
  const std::vector<Victim> victims = choose_victims(needed, scores);
  if (victims.size() < others.size()) {
    for (const Victim& victim : victims) {
      layer_.stamp[victim.slot] = victim.stamp;
    }
    state.hand = hand;
    throw StateError("gpu_slots: " + std::to_string(wanted) + " slots wanted, but of " + std::to_string(layer_.slots) +
                     " only " + std::to_string(from_stack + victims.size()) + " are not in use by this step");
  }
  for (const std::int32_t row : host_rows.first(from_stack)) {
    map(row, layer_.free_slots[--state.free]);
  }
  for (std::size_t i = 0; i < others.size(); ++i) {
    evict(victims[i].slot);
    map(others[i], victims[i].slot);
  }
}

std::vector<CacheOps::Victim> CacheOps::choose_victims(std::int32_t needed, const RowScores& scores) {
  std::vector<Victim> victims;
  if (needed == 0) {
    return victims;
  }
  const std::int32_t window = window_slots(needed, layer_.slots);
  const std::int32_t planned = planned_windows(needed, window);
  const std::int32_t turn = (layer_.slots + window - 1) / window;
  std::int32_t left = needed;
  for (std::int32_t i = 0; i < planned + turn && left > 0; ++i) {
    const std::int32_t windows_left = std::max(planned - i, 1);
    take_coldest(window, (left + windows_left - 1) / windows_left, scores, victims);
    left = needed - static_cast<std::int32_t>(victims.size());
  }
  return victims;
}

void CacheOps::take_coldest(std::int32_t window, std::int32_t quota, const RowScores& scores,
                            std::vector<Victim>& victims) {
  struct Seen {
    std::int32_t slot;
    Candidate candidate;
    std::int32_t coldness;
  };
  std::vector<Seen> seen;
  float farthest = 0.0F;
  std::int32_t oldest = 1;
  std::int32_t& hand = layer_.replacement->hand;
  for (std::int32_t i = 0; i < window; ++i) {
    const std::int32_t slot = hand;
    hand = slot + 1 == layer_.slots ? 0 : slot + 1;
    const std::int32_t stamp = layer_.stamp[slot];
    if (stamp == kFree || stamp >= tick_) {
      continue;
    }
    const Candidate candidate{.distance = scores.distance(layer_.host_of[slot]), .age = age_of(stamp, tick_)};
    farthest = std::max(farthest, candidate.distance);
    oldest = std::max(oldest, candidate.age);
    seen.push_back({.slot = slot, .candidate = candidate, .coldness = 0});
  }
  for (Seen& one : seen) {
    one.coldness = coldness(one.candidate, farthest, oldest);
  }
  std::ranges::stable_sort(seen, std::greater<>{}, &Seen::coldness);
  const auto taken = std::min(seen.size(), static_cast<std::size_t>(quota));
  for (const Seen& one : std::span(seen).first(taken)) {
    victims.push_back({.slot = one.slot, .stamp = layer_.stamp[one.slot]});
    layer_.stamp[one.slot] = tick_;
  }
}

void CacheOps::evict(std::int32_t slot) {
  layer_.slot_of[layer_.host_of[slot]] = kNone;
  ++layer_.counters->evictions;
}

void CacheOps::map(std::int32_t host_row, std::int32_t slot) {
  layer_.slot_of[host_row] = slot;
  layer_.host_of[slot] = host_row;
  layer_.stamp[slot] = tick_;
}

void CacheOps::release(std::int32_t host_row) {
  const std::int32_t slot = layer_.slot_of[host_row];
  if (slot == kNone) {
    return;
  }
  layer_.slot_of[host_row] = kNone;
  layer_.host_of[slot] = kNone;
  layer_.stamp[slot] = kFree;
  layer_.free_slots[layer_.replacement->free++] = slot;
}

}  // namespace echo
