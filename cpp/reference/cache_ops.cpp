// The replacement rule (replacement.hpp) one slot after the other: the same calls leave the same
// state. Whether there is room shows only when all that may be taken has been looked at, so victims
// are chosen first and maps change afterwards. Cost: a window per `kSpread` slots needed and a sort
// of each; a whole turn of the pool only where that yields too little.
#include "reference/cache_ops.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "echo/errors.hpp"

namespace echo {

void CacheOps::begin(std::int32_t tick) {
  if (tick < 1) {
    throw StateError("tick: " + std::to_string(tick) + " given, expected at least 1");
  }
  tick_ = tick;
}

void CacheOps::protect(std::int32_t slot) {
  std::int32_t& stamp = layer_.stamp[slot];
  layer_.counters->prefetched_used += stamp == prefetched_at(tick_) ? 1 : 0;
  layer_.counters->forecast_used += is_forecast(stamp) ? 1 : 0;
  stamp = tick_;
}

void CacheOps::allocate(std::span<const std::int32_t> host_rows, const RowScores& scores) {
  ReplacementState& state = *layer_.replacement;
  const std::int64_t others = std::max<std::int64_t>(std::ssize(host_rows) - state.free, 0);
  const std::int32_t hand = state.hand;
  // More than the pool has are as impossible as one more than it has.
  const auto needed = static_cast<std::int32_t>(std::min<std::int64_t>(others, layer_.slots + 1LL));
  const std::vector<Victim> victims = choose_victims(needed, scores, 0.0F);
  if (std::ssize(victims) < others) {
    for (const Victim& victim : victims) {
      layer_.stamp[victim.slot] = victim.stamp;
    }
    state.hand = hand;
    throw StateError("gpu_slots: " + std::to_string(host_rows.size()) + " slots wanted, but of " +
                     std::to_string(layer_.slots) + " only " + std::to_string(std::ssize(victims) + state.free) +
                     " are not in use by this step");
  }
  give(host_rows, victims, tick_);
}

std::size_t CacheOps::prefetch(std::span<const std::int32_t> host_rows, const RowScores& scores) {
  return fetch_ahead(host_rows, scores, std::numeric_limits<float>::min(), prefetched_at(tick_));
}

std::size_t CacheOps::forecast(std::span<const std::int32_t> host_rows, const RowScores& scores, float distance) {
  const float least = std::nextafter(distance, std::numeric_limits<float>::infinity());
  return fetch_ahead(host_rows, scores, least, forecast_at(tick_));
}

std::size_t CacheOps::fetch_ahead(std::span<const std::int32_t> host_rows, const RowScores& scores, float least,
                                  std::int32_t stamp) {
  const std::int32_t free = layer_.replacement->free;
  const auto others =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(std::ssize(host_rows) - free, 0, layer_.slots));
  const std::vector<Victim> victims = choose_victims(others, scores, least);
  const std::size_t rows = std::min(host_rows.size(), static_cast<std::size_t>(free) + victims.size());
  give(host_rows.first(rows), victims, stamp);
  return rows;
}

void CacheOps::give(std::span<const std::int32_t> host_rows, const std::vector<Victim>& victims, std::int32_t stamp) {
  auto victim = victims.begin();
  for (const std::int32_t row : host_rows) {
    if (layer_.replacement->free > 0) {
      map(row, layer_.free_slots[--layer_.replacement->free], stamp);
    } else {
      evict(victim->slot);
      map(row, (victim++)->slot, stamp);
    }
  }
}

std::vector<CacheOps::Victim> CacheOps::choose_victims(std::int32_t needed, const RowScores& scores, float least) {
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
    take_coldest(window, (left + windows_left - 1) / windows_left, scores, least, victims);
    left = needed - static_cast<std::int32_t>(victims.size());
  }
  return victims;
}

void CacheOps::take_coldest(std::int32_t window, std::int32_t quota, const RowScores& scores, float least,
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
    if (candidate.distance >= 0.0F && candidate.distance < least) {
      continue;
    }
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

void CacheOps::map(std::int32_t host_row, std::int32_t slot, std::int32_t stamp) {
  layer_.slot_of[host_row] = slot;
  layer_.host_of[slot] = host_row;
  layer_.stamp[slot] = stamp;
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
