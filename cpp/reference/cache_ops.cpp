// The replacement rule (replacement.hpp) one slot after the other: the same calls leave the same
// state. Whether there is room shows only when all that may be taken has been looked at, so victims
// are chosen first and maps change afterwards. Cost: a window per `kSpread` slots needed and a sort
// of each; a whole turn of the pool only where that yields too little. New rows go by hints first.
#include "reference/cache_ops.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "cache_manager/hints.hpp"
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
  const Choice choice = choose_or_throw(host_rows.size(), {}, scores);
  give(host_rows, choice.victims, tick_);
  if (!choice.victims.empty()) {
    leave_hints(choice.next, host_rows, scores);
  }
}

void CacheOps::allocate_new(std::span<const std::int32_t> host_rows) {
  std::vector<Victim> hinted = take_hints(std::ssize(host_rows) - layer_.replacement->free);
  give(host_rows, choose_or_throw(host_rows.size(), std::move(hinted), {}).victims, tick_);
}

CacheOps::Choice CacheOps::choose_or_throw(std::size_t wanted, std::vector<Victim> hinted, const RowScores& scores) {
  ReplacementState& state = *layer_.replacement;
  const std::int64_t others = std::max<std::int64_t>(static_cast<std::int64_t>(wanted) - state.free, 0);
  const std::int32_t hand = state.hand;
  Choice choice{.victims = std::move(hinted), .next = {}};
  // More than the pool has are as impossible as one more than it has.
  choose_victims(
      static_cast<std::int32_t>(std::min<std::int64_t>(others - std::ssize(choice.victims), layer_.slots + 1LL)),
      scores, 0.0F, choice);
  if (std::ssize(choice.victims) < others) {
    for (const Victim& victim : choice.victims) {
      layer_.stamp[victim.slot] = victim.stamp;
    }
    state.hand = hand;
    throw StateError("gpu_slots: " + std::to_string(wanted) + " slots wanted, but of " + std::to_string(layer_.slots) +
                     " only " + std::to_string(std::ssize(choice.victims) + state.free) +
                     " are not in use by this step");
  }
  return choice;
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
  Choice choice;
  choose_victims(others, scores, least, choice);
  const std::size_t rows = std::min(host_rows.size(), static_cast<std::size_t>(free) + choice.victims.size());
  give(host_rows.first(rows), choice.victims, stamp);
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

void CacheOps::choose_victims(std::int32_t needed, const RowScores& scores, float least, Choice& choice) {
  if (needed == 0) {
    return;
  }
  const std::size_t wanted = choice.victims.size() + static_cast<std::size_t>(needed);
  const std::int32_t window = window_slots(needed, layer_.slots);
  const std::int32_t planned = planned_windows(needed, window);
  const std::int32_t turn = (layer_.slots + window - 1) / window;
  std::int32_t left = needed;
  for (std::int32_t i = 0; i < planned + turn && left > 0; ++i) {
    const std::int32_t windows_left = std::max(planned - i, 1);
    take_coldest(window, (left + windows_left - 1) / windows_left, scores, least, choice);
    left = static_cast<std::int32_t>(wanted - choice.victims.size());
  }
}

void CacheOps::take_coldest(std::int32_t window, std::int32_t quota, const RowScores& scores, float least,
                            Choice& choice) {
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
    choice.victims.push_back({.slot = one.slot, .stamp = layer_.stamp[one.slot]});
    layer_.stamp[one.slot] = tick_;
  }
  choice.next.clear();
  if (seen.size() - taken >= kLeastLeft) {
    for (const Seen& one : std::span(seen).subspan(taken)) {
      choice.next.push_back({.slot = one.slot, .stamp = layer_.stamp[one.slot]});
    }
  }
}

void CacheOps::leave_hints(const std::vector<Victim>& next, std::span<const std::int32_t> fetched,
                           const RowScores& scores) {
  const Hints hints(layer_);
  std::int32_t left = 0;
  for (auto one = next.begin(); one != next.end() && left < hints.count; ++one) {
    hints.leave(left++, {.slot = one->slot, .stamp = one->stamp});
  }
  struct Fetched {
    float below_kth;
    std::int32_t slot;
  };
  std::vector<Fetched> scored;
  for (const std::int32_t row : fetched) {
    float by = 0.0F;
    if (scores.below_kth(row, by)) {
      scored.push_back(
          {.below_kth = std::isnan(by) ? std::numeric_limits<float>::infinity() : by, .slot = lookup(row)});
    }
  }
  std::ranges::stable_sort(scored, std::greater<>{}, &Fetched::below_kth);
  for (auto one = scored.begin(); one != scored.end() && left < hints.count; ++one) {
    hints.leave(left++, {.slot = one->slot, .stamp = tick_});
  }
  while (left < hints.count) {
    hints.leave(left++, {.slot = kNone, .stamp = kFree});
  }
}

std::vector<CacheOps::Victim> CacheOps::take_hints(std::int64_t most) {
  std::vector<Victim> victims;
  const Hints hints(layer_);
  for (std::int32_t i = 0; i < hints.count && std::ssize(victims) < most; ++i) {
    const Hint hint = hints.read(i, layer_);
    if (hint.slot >= 0 && hint.holds(layer_.stamp[hint.slot], tick_)) {
      victims.push_back({.slot = hint.slot, .stamp = hint.stamp});
      layer_.stamp[hint.slot] = tick_;
    }
  }
  return victims;
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
