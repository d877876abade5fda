#pragma once
// A layer's maps in host memory, for tests of the protocol in residency.cuh.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cache_manager/address.hpp"
#include "cache_manager/layer_view.hpp"

namespace echo::residency_test {

inline std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }

/// What slot_of says of a row that is being fetched, and of one for which the call of this tick got no slot.
struct Marks {
  std::int32_t pending;
  std::int32_t failed;
};

/// The maps of one layer; all slots are free.
template <typename Layer>
class Maps {
 public:
  Maps(std::int32_t slots, std::int32_t host_rows)
      : slot_of(at(host_rows), kNone),
        host_of(at(slots), kNone),
        stamp(at(slots), kFree),
        content(at(slots), kNone),
        free_slots_(at(slots)),
        replacement_{.hand = 0, .free = slots} {
    std::iota(free_slots_.rbegin(), free_slots_.rend(), 0);
  }
  Maps(const Maps&) = delete;
  Maps& operator=(const Maps&) = delete;

  Layer layer() {
    Layer view{};
    view.slot_of = slot_of.data();
    view.host_of = host_of.data();
    view.stamp = stamp.data();
    view.free_slots = free_slots_.data();
    view.replacement = &replacement_;
    view.slots = static_cast<std::int32_t>(host_of.size());
    view.host_rows = static_cast<std::int64_t>(slot_of.size());
    return view;
  }

  /// Gives the row the free slot on top of the stack.
  std::int32_t seat(std::int32_t row, std::int32_t tick) {
    const std::int32_t slot = free_slots_[at(--replacement_.free)];
    slot_of[at(row)] = slot;
    host_of[at(slot)] = content[at(slot)] = row;
    stamp[at(slot)] = tick;
    return slot;
  }
  void release(std::int32_t row) {
    const std::int32_t slot = std::exchange(slot_of[at(row)], kNone);
    if (slot >= 0) {
      host_of[at(slot)] = kNone;
      stamp[at(slot)] = kFree;
      free_slots_[at(replacement_.free++)] = slot;
    }
  }

  /// What is wrong with them after a call, empty if nothing.
  std::string fault(std::int32_t now, Marks marks) const {
    std::int32_t free = 0;
    for (std::int32_t slot = 0; slot < static_cast<std::int32_t>(host_of.size()); ++slot) {
      const std::string name = "slot " + std::to_string(slot);
      const std::int32_t row = host_of[at(slot)];
      if ((row == kNone) != (stamp[at(slot)] == kFree)) {
        return name + ": row " + std::to_string(row) + ", stamp " + std::to_string(stamp[at(slot)]);
      }
      if (row == kNone) {
        ++free;
        continue;
      }
      if (slot_of[at(row)] != slot) {
        return name + " has row " + std::to_string(row) + ", which has slot " + std::to_string(slot_of[at(row)]);
      }
      const std::int32_t tick = stamp[at(slot)] < kFree ? fetched_at(stamp[at(slot)]) : stamp[at(slot)];
      if (tick < 1 || tick > now) {
        return name + ": stamp " + std::to_string(stamp[at(slot)]);
      }
      if (content[at(slot)] != row) {
        return name + " has the bytes of row " + std::to_string(content[at(slot)]) + ", not " + std::to_string(row);
      }
    }
    for (std::int32_t row = 0; row < static_cast<std::int32_t>(slot_of.size()); ++row) {
      const std::int32_t slot = slot_of[at(row)];
      const bool failed = slot >= marks.failed && slot < marks.pending;  // in this call or before
      if (slot >= 0 ? host_of[at(slot)] != row : slot != kNone && !failed) {
        return "row " + std::to_string(row) + " has slot " + std::to_string(slot);
      }
    }
    std::vector<std::int32_t> stack(free_slots_.begin(), free_slots_.begin() + std::max(replacement_.free, 0));
    std::ranges::sort(stack);
    const bool twice = std::ranges::adjacent_find(stack) != stack.end();
    if (replacement_.free != free || twice ||
        std::ranges::any_of(stack, [&](std::int32_t slot) { return stamp[at(slot)] != kFree; })) {
      return "stack: " + std::to_string(replacement_.free) + " slots for " + std::to_string(free) + " free ones";
    }
    return {};
  }

  std::vector<std::int32_t> slot_of;
  std::vector<std::int32_t> host_of;
  std::vector<std::int32_t> stamp;
  std::vector<std::int32_t> content;  ///< whose bytes the slot has

 private:
  std::vector<std::int32_t> free_slots_;
  ReplacementState replacement_;
};

}  // namespace echo::residency_test
