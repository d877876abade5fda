#pragma once
// RowPrefetcher: warps of thread blocks of score that do nothing else fetch rows ahead that recall will probably want
// (residency.cuh: the protocol, and what it leaves out here).
//
// Of the rows that are missing a warp takes as many as it has in flight at once: a share of the call's budget, the rows
// by compare-and-swap on slot_of, their bytes from host memory into registers, slots meanwhile (free ones, else the
// oldest of a window of 96; the scores that recall's rule would look at are only being computed), bytes to the slots,
// maps. Whatever is busy or used up is left to recall: nobody waits for anybody.
// Cost: four dependent accesses and a host read, some 10 us for each few rows.

#include <algorithm>

#include "cache_manager/copy_rows.cuh"
#include "cache_manager/free_stack.cuh"
#include "cache_manager/residency.cuh"

namespace echo {

inline constexpr std::int32_t kPrefetchAtOnce = 8;   ///< rows that go together, at most
inline constexpr std::uint32_t kPrefetchSpread = 3;  ///< slots of a window for each lane
inline constexpr std::int32_t kPrefetchWindows = 3;  ///< looked at for them, at most

struct PrefetchShared {
  std::int32_t rows[kPrefetchAtOnce];
  std::int32_t slots[kPrefetchAtOnce];
};

/// Lanes of a set below this one.
__device__ inline std::int32_t rank_in(unsigned lanes) { return __popc(lanes & ((1U << lane_index()) - 1U)); }

/// What a call may prefetch.
struct PrefetchBudget {
  std::int32_t* used;  ///< rows, by all thread blocks
  std::int32_t cap;
};

/// All functions are called by the whole warp.
class RowPrefetcher {
 public:
  /// Of warp `index` among so many that prefetch.
  __device__ RowPrefetcher(const LayerView& layer, std::int32_t now, PrefetchBudget budget, std::uint32_t index,
                           std::uint32_t warps, PrefetchShared& shared)
      : layer_(layer), shared_(shared), budget_(budget), now_(now) {
    constexpr std::uint32_t kScatter = 0x9E3779B1U;  // as in claim_place, but half a pool away from those places
    const auto slots = static_cast<std::uint32_t>(layer.slots);
    const std::uint32_t share = max(slots / warps, std::uint32_t{kWarp});
    place_ = (static_cast<std::uint32_t>(now) * kScatter + index * share + slots / 2U) % slots;
    const std::int32_t pieces = max(layer.row_bytes / RowGroup::kPieceBytes, 1);
    at_once_ = min(max(RowGroup::kRound / pieces, 1), kPrefetchAtOnce);
  }

  /// Rows that go together.
  __device__ std::int32_t at_once() const { return at_once_; }

  /// Fetches rows, those of the first `wanted` lanes, that are still missing.
  __device__ void fetch(std::int32_t listed, std::int32_t wanted);

  /// Adds what was done to the layer's counters.
  __device__ void report() const {
    if (lane_index() == 0) {
      count(&layer_.counters->prefetched, fetched_);
      count(&layer_.counters->prefetches_capped, capped_);
      count(&layer_.counters->evictions, evicted_);
    }
  }

 private:
  __device__ void refund(std::int32_t rows) const {
    if (rows != 0) {
      atomicSub(budget_.used, rows);
    }
  }

  /// Finds slots for `needed` rows, which become shared.slots; returns for how many.
  __device__ std::int32_t take_slots(std::int32_t needed);
  __device__ std::int32_t take_oldest(std::int32_t given, std::int32_t needed);

  const LayerView& layer_;
  PrefetchShared& shared_;
  PrefetchBudget budget_;
  std::int32_t now_;
  std::uint32_t place_ = 0;   ///< slot of the next window
  std::int32_t at_once_ = 1;  ///< rows that a warp has in flight
  std::int32_t fetched_ = 0;
  std::int32_t evicted_ = 0;
  std::int32_t capped_ = 0;
  bool exhausted_ = false;  ///< the budget, so nobody needs to ask again
};

__device__ inline void RowPrefetcher::fetch(std::int32_t listed, std::int32_t wanted) {
  if (exhausted_) {
    capped_ += wanted;
    return;
  }
  // The budget is asked while rows are claimed.
  const std::int32_t used = lane_index() == 0 ? atomicAdd(budget_.used, wanted) : 0;
  const bool claimed = lane_index() < wanted && claim_row(layer_, listed);
  const unsigned lanes = __ballot_sync(kAllLanes, claimed);
  const std::int32_t granted = min(max(budget_.cap - __shfl_sync(kAllLanes, used, 0), 0), wanted);
  exhausted_ = granted < wanted;
  capped_ += wanted - granted;
  const std::int32_t rows = min(__popc(lanes), granted);
  if (claimed && rank_in(lanes) < rows) {
    shared_.rows[rank_in(lanes)] = listed;
  } else if (claimed) {
    give_up_row(layer_, listed);
  }
  __syncwarp();
  const RowList list{shared_.rows, shared_.slots, rows};
  RowGroup group(layer_, list, 0, rows);
  group.load(0);
  const std::int32_t given = rows == 0 ? 0 : take_slots(rows);
  const bool mine = lane_index() < rows;
  const std::int32_t row = mine ? shared_.rows[lane_index()] : kNone;
  const std::int32_t slot = mine ? shared_.slots[lane_index()] : kNone;
  if (slot != kNone) {
    assign(layer_, slot, row);
  } else if (mine) {
    give_up_row(layer_, row);
  }
  group.store(0);
  group.copy(RowGroup::kRound);
  __syncwarp();  // all lanes' bytes, then the maps
  if (slot != kNone) {
    publish(layer_, slot, row, prefetched_at(now_));
  }
  if (lane_index() == 0) {
    refund(wanted - given);
  }
  fetched_ += given;
}

__device__ inline std::int32_t RowPrefetcher::take_slots(std::int32_t needed) {
  std::int32_t top = 0;
  if (lane_index() == 0 && AtomicWord(layer_.replacement->free).load(cuda::memory_order_relaxed) > 0) {
    top = pop_free(layer_, needed);
  }
  top = __shfl_sync(kAllLanes, top, 0);
  std::int32_t given = min(max(top, 0), needed);
  if (lane_index() < needed) {
    shared_.slots[lane_index()] = lane_index() < given ? layer_.free_slots[top - 1 - lane_index()] : kNone;
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
