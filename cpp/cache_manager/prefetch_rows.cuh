#pragma once
// RowPrefetcher: warps of thread blocks of score that do nothing else fetch rows ahead that recall will probably want
// (residency.cuh: the protocol, and what it leaves out here).
//
// A warp takes a row or two at once, which others have claimed: their bytes from host memory into registers, slots
// meanwhile (free ones, else the oldest of a window of 96; the scores that recall's rule would look at are only being
// computed), bytes to the slots, maps. Rows for which there is no slot are left to recall: nobody waits for anybody.
// Cost: a host read, in which a slot is found, too: on an H200 3 us where 15 rows are under way in the multiprocessor,
// 5 where 45 are. Slots claimed ahead, for the next rows, gain nothing: the bytes are what takes so long.

#include <algorithm>

#include "cache_manager/copy_rows.cuh"
#include "cache_manager/free_stack.cuh"
#include "cache_manager/residency.cuh"

namespace echo {

inline constexpr std::int32_t kPrefetchAtOnce = 2;   ///< rows that go together, at most
inline constexpr std::uint32_t kPrefetchSpread = 3;  ///< slots of a window for each lane
inline constexpr std::int32_t kPrefetchWindows = 3;  ///< looked at for them, at most

struct PrefetchShared {
  std::int32_t rows[kPrefetchAtOnce];
  std::int32_t slots[kPrefetchAtOnce];
};

/// Lanes of a set below this one.
__device__ inline std::int32_t rank_in(unsigned lanes) { return __popc(lanes & ((1U << lane_index()) - 1U)); }

/// All functions are called by the whole warp.
class RowPrefetcher {
 public:
  /// Of warp `index` among so many that prefetch.
  __device__ RowPrefetcher(const LayerView& layer, std::int32_t now, std::uint32_t index, std::uint32_t warps,
                           PrefetchShared& shared)
      : layer_(layer), shared_(shared), now_(now) {
    constexpr std::uint32_t kScatter = 0x9E3779B1U;  // as in claim_place, but half a pool away from those places
    const auto slots = static_cast<std::uint32_t>(layer.slots);
    const std::uint32_t share = max(slots / warps, std::uint32_t{kWarp});
    place_ = (static_cast<std::uint32_t>(now) * kScatter + index * share + slots / 2U) % slots;
    const std::int32_t pieces = max(layer.row_bytes / RowGroup::kPieceBytes, 1);
    at_once_ = min(max(RowGroup::kRound / pieces, 1), kPrefetchAtOnce);
    const std::int32_t free = AtomicWord(layer.replacement->free).load(cuda::memory_order_relaxed);
    any_free_ = __shfl_sync(kAllLanes, free, 0) > 0;
  }

  /// Rows that go together, at most.
  __device__ std::int32_t at_once() const { return at_once_; }

  /// Fetches rows that are claimed (claim_row), those of the first `rows` lanes.
  __device__ void fetch(std::int32_t claimed, std::int32_t rows);

  /// Adds what was done to the layer's counters, and the rows to `all`.
  __device__ void report(std::int32_t* all) const {
    if (lane_index() == 0 && fetched_ != 0) {
      count(&layer_.counters->prefetched, fetched_);
      count(&layer_.counters->evictions, evicted_);
      atomicAdd(all, fetched_);
    }
  }

 private:
  /// Finds slots for `needed` rows, which become shared.slots; returns for how many.
  __device__ std::int32_t take_slots(std::int32_t needed);
  __device__ std::int32_t take_oldest(std::int32_t given, std::int32_t needed);

  const LayerView& layer_;
  PrefetchShared& shared_;
  std::int32_t now_;
  std::uint32_t place_ = 0;   ///< slot of the next window
  std::int32_t at_once_ = 1;  ///< rows that a warp has in flight
  std::int32_t fetched_ = 0;
  std::int32_t evicted_ = 0;
  bool any_free_ = false;  ///< slots: none become free in this launch
};

__device__ inline void RowPrefetcher::fetch(std::int32_t claimed, std::int32_t rows) {
  const bool mine = lane_index() < rows;
  if (mine) {
    shared_.rows[lane_index()] = claimed;
  }
  __syncwarp();
  const RowList list{shared_.rows, shared_.slots, rows};
  RowGroup group(layer_, list, 0, rows);
  group.load(0);
  fetched_ += take_slots(rows);  // while bytes are on their way
  const std::int32_t slot = mine ? shared_.slots[lane_index()] : kNone;
  group.store(0);
  group.copy(RowGroup::kRound);
  // In any order with the bytes: until this launch has ended nobody reads the slot or takes it (yields_ahead).
  if (slot != kNone) {
    assign(layer_, slot, claimed);
    map_row(layer_, slot, claimed, prefetched_at(now_));
  } else if (mine) {
    give_up_row(layer_, claimed);
  }
  __syncwarp();
}

__device__ inline std::int32_t RowPrefetcher::take_slots(std::int32_t needed) {
  std::int32_t given = 0;
  if (any_free_) {
    const std::int32_t top = __shfl_sync(kAllLanes, lane_index() == 0 ? pop_free(layer_, needed) : 0, 0);
    given = min(max(top, 0), needed);
    any_free_ = given == needed;
    if (lane_index() < given) {
      shared_.slots[lane_index()] = layer_.free_slots[top - 1 - lane_index()];
    }
  }
  if (lane_index() >= given && lane_index() < needed) {
    shared_.slots[lane_index()] = kNone;
  }
  for (std::int32_t i = 0; i < kPrefetchWindows && given < needed; ++i) {
    __syncwarp();
    given += take_oldest(given, needed);
  }
  __syncwarp();
  return given;
}

/// From the next window, for rows `given` and those behind it; returns for how many. Each lane offers the oldest of a
/// few slots, so that what was used last, half of a small pool, is seldom among the oldest of all.
__device__ inline std::int32_t RowPrefetcher::take_oldest(std::int32_t given, std::int32_t needed) {
  const auto slots = static_cast<std::uint32_t>(layer_.slots);
  const auto lane = static_cast<std::uint32_t>(lane_index());
  std::int32_t stamps[kPrefetchSpread];
  std::int32_t rows[kPrefetchSpread];
#pragma unroll
  for (std::uint32_t i = 0; i < kPrefetchSpread; ++i) {
    const auto at = static_cast<std::int32_t>((place_ + i * kWarp + lane) % slots);
    stamps[i] = stamp_word(layer_, at).load(cuda::memory_order_relaxed);
    rows[i] = host_word(layer_, at).load(cuda::memory_order_relaxed);
  }
  std::int32_t age = 0;
  std::int32_t slot = kNone;
  std::int32_t stamp = kFree;
  std::int32_t row = kNone;
#pragma unroll
  for (std::uint32_t i = 0; i < kPrefetchSpread; ++i) {
    const bool there = i * kWarp + lane < slots && rows[i] >= 0 && yields_ahead(stamps[i], now_);
    if (const std::int32_t own = there ? age_of(stamps[i], now_) : 0; own > age) {
      age = own;
      slot = static_cast<std::int32_t>((place_ + i * kWarp + lane) % slots);
      stamp = stamps[i];
      row = rows[i];
    }
  }
  place_ = (place_ + kPrefetchSpread * kWarp) % slots;
  bool chosen = false;
  for (std::int32_t left = needed - given; left > 0; --left) {
    const std::int32_t oldest = __reduce_max_sync(kAllLanes, age);
    if (oldest == 0) {
      break;
    }
    if (lane_index() == __ffs(static_cast<int>(__ballot_sync(kAllLanes, age == oldest))) - 1) {
      chosen = true;
      age = 0;
    }
  }
  const bool taken = chosen && evict(layer_, slot, stamp, row);
  const unsigned lanes = __ballot_sync(kAllLanes, taken);
  if (taken) {
    shared_.slots[given + rank_in(lanes)] = slot;
  }
  evicted_ += __popc(lanes);
  return __popc(lanes);
}

}  // namespace echo
