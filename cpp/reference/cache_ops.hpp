#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache_manager/layer_view.hpp"
#include "cache_manager/row_scores.hpp"

namespace echo {

/// The operations on one layer's residency state, one after the other on one thread. After each of
/// them
///   slot_of and host_of are inverse to each other,
///   stamp is kFree exactly where host_of is kNone,
///   the stack of free slots holds exactly those slots, each once.
class CacheOps {
 public:
  explicit CacheOps(const LayerView& layer) : layer_(layer) {}

  /// Starts a layer call: what is used from now on is stamped with `tick`. StateError if there is no
  /// such tick.
  void begin(std::int32_t tick);

  /// Slot of a host row, kNone if it has none.
  std::int32_t lookup(std::int32_t host_row) const { return layer_.slot_of[host_row]; }
  /// Stamps the slot of a resident row, which protects it for the rest of this tick.
  void protect(std::int32_t slot);

  /// Gives each of the host rows, distinct and not resident, a slot: free ones first, then those
  /// that the replacement rule gives away, judged by `scores`. If the rows do not fit beside what is
  /// protected: StateError naming `gpu_slots`, and nothing has changed.
  void allocate(std::span<const std::int32_t> host_rows, const RowScores& scores = {});
  /// The same for new rows: before anything is scored, the last `allocate` of the layer has left hints.
  void allocate_new(std::span<const std::int32_t> host_rows);
  /// The same for rows that are only likely to be needed, for as many of them, from the first on, as there is room
  /// for: they get neither slots that are in use nor those of rows at or above the k-th scores of `scores`. They may be
  /// given away in this very tick. Returns how many.
  std::size_t prefetch(std::span<const std::int32_t> host_rows, const RowScores& scores);
  /// Likewise for rows that the next step is likely to need, the farthest of them `distance` below its k-th score: they
  /// get no slot of a row that is scored and not farther than that.
  std::size_t forecast(std::span<const std::int32_t> host_rows, const RowScores& scores, float distance);
  /// Takes the slot of a host row away, if it has one. No data moves: the row is on the host.
  void release(std::int32_t host_row);

 private:
  struct Victim {
    std::int32_t slot;
    std::int32_t stamp;
  };

  struct Choice {
    std::vector<Victim> victims;  ///< stamped, so that none is chosen twice, but still mapped
    std::vector<Victim> next;     ///< of the last window: what would have gone next, unless hardly any is left
  };

  /// Victims for those of `wanted` rows for which no slot is free: `hinted` ones, then by the rule. StateError if that
  /// does not suffice.
  Choice choose_or_throw(std::size_t wanted, std::vector<Victim> hinted, const RowScores& scores);
  /// Adds `needed` slots in the order in which the rule gives them away, at `least` of that distance if they
  /// are scored. Fewer where there are no more.
  void choose_victims(std::int32_t needed, const RowScores& scores, float least, Choice& choice);
  /// Moves the hand over the next `window` slots and takes the `quota` coldest of them.
  void take_coldest(std::int32_t window, std::int32_t quota, const RowScores& scores, float least, Choice& choice);
  /// Hints for the next step: these slots, then those of the rows just fetched, the farthest below the k-th score
  /// first.
  void leave_hints(const std::vector<Victim>& next, std::span<const std::int32_t> fetched, const RowScores& scores);
  /// Up to `most` slots that hints name, stamped.
  std::vector<Victim> take_hints(std::int64_t most);
  /// Gives slots to the first rows, as many as there are free ones and victims; returns how many.
  std::size_t fetch_ahead(std::span<const std::int32_t> host_rows, const RowScores& scores, float least,
                          std::int32_t stamp);
  /// Maps the rows to free slots first, then to those of the victims.
  void give(std::span<const std::int32_t> host_rows, const std::vector<Victim>& victims, std::int32_t stamp);
  void evict(std::int32_t slot);
  void map(std::int32_t host_row, std::int32_t slot, std::int32_t stamp);

  LayerView layer_;
  std::int32_t tick_ = 0;
};

}  // namespace echo
