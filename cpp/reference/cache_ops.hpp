#pragma once

#include <cstdint>
#include <span>

#include "cache_manager/layer_view.hpp"

namespace echo {

/// The operations on one layer's residency state, one after the other on one thread. After each of
/// them
///   slot_of and host_of are inverse to each other,
///   stamp is kFree exactly where host_of is kNone,
///   the histogram counts the slots by stamp, and `used` counts those that hold a row.
class CacheOps {
 public:
  explicit CacheOps(const LayerView& layer) : layer_(layer) {}

  /// Starts a layer call: what is used from now on is stamped with `tick`. StateError if ticks go
  /// back.
  void begin(std::int32_t tick);

  /// Slot of a host row, kNone if it has none.
  std::int32_t lookup(std::int32_t host_row) const { return layer_.slot_of[host_row]; }
  /// Stamps the slot of a resident row, which protects it for the rest of this tick.
  void protect(std::int32_t slot) { restamp(slot, tick_); }

  /// Gives each of the host rows, distinct and not resident, a slot: a free one or one whose row
  /// may be evicted. If the rows do not fit beside what is protected: StateError naming
  /// `gpu_slots`, and nothing has changed.
  void allocate(std::span<const std::int32_t> host_rows);
  /// Takes the slot of a host row away, if it has one. No data moves: the row is on the host.
  void release(std::int32_t host_row);

 private:
  void restamp(std::int32_t slot, std::int32_t stamp);
  /// Moves the clock hand to the next slot that `limit` lets go, over at most `left` slots.
  std::int32_t next_victim(std::int32_t limit, std::int32_t& left);
  void evict(std::int32_t slot);

  LayerView layer_;
  std::int32_t tick_ = 0;
};

}  // namespace echo
