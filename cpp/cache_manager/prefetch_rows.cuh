#pragma once
// RowPrefetcher: warps of thread blocks of score that do nothing else fetch rows ahead that recall will probably want
// (residency.cuh: the protocol, and what it leaves out here).
//
// A warp takes a few rows at once, which others have claimed: their bytes from host memory into registers, then to
// slots, then maps. What is loaded in a multiprocessor comes back in the order in which it was asked for, so whatever a
// fetch has to wait for besides its bytes, it waits for the bytes of all other warps' rows, too. So a warp has slots in
// reserve: while rows are on their way, it claims slots for the next ones, out of a window that it looked at while the
// rows before were. Slots are free ones, else the oldest of a window of 96; the scores that recall's rule would look at
// are only being computed. Those left over in the end get their stamps back: nobody has noticed. Rows for which there
// is no slot are left to recall: nobody waits for anybody.
// Cost: a host read for each few rows.

#include <algorithm>

#include "cache_manager/copy_rows.cuh"
#include "cache_manager/residency.cuh"

namespace echo {

inline constexpr std::int32_t kPrefetchAtOnce = 3;   ///< rows that go together, at most
inline constexpr std::uint32_t kPrefetchSpread = 3;  ///< slots of a window for each lane
inline constexpr std::int32_t kPrefetchWindows = 3;  ///< looked at for rows that are waiting, at most

/// A slot, and what it holds.
struct HeldSlot {
  std::int32_t slot;
  std::int32_t stamp;
  std::int32_t row;
};

struct PrefetchShared {
  std::int32_t rows[kPrefetchAtOnce];
  std::int32_t slots[kPrefetchAtOnce];
  HeldSlot reserve[kPrefetchAtOnce];  ///< claimed, the rows still mapped
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
    look();
    if (!any_free_) {
      refill(at_once_);
    }
  }

  /// Rows that go together, at most.
  __device__ std::int32_t at_once() const { return at_once_; }

  /// Fetches rows that are claimed (claim_row), those of the first `rows` lanes.
  __device__ void fetch(std::int32_t claimed, std::int32_t rows);

  /// Gives slots back, and adds what was done to the layer's counters, and the rows to `all`.
  __device__ void finish(std::int32_t* all) const {
    if (lane_index() < reserved_) {
      const HeldSlot& held = shared_.reserve[lane_index()];
      stamp_word(layer_, held.slot).store(held.stamp, cuda::memory_order_relaxed);
    }
    if (lane_index() == 0 && fetched_ != 0) {
      count(&layer_.counters->prefetched, fetched_);
      count(&layer_.counters->evictions, evicted_);
      atomicAdd(all, fetched_);
    }
  }

 private:
  /// Loads a window of slots; that it is there is first asked in choose.
  __device__ void look();
  /// Of the window, the oldest slots that may go, `wanted` or fewer: one of each of some lanes.
  __device__ HeldSlot choose(std::int32_t wanted);
  /// Begins to claim what was chosen; what it returns is for add.
  __device__ std::int32_t claim(const HeldSlot& chosen) const {
    return chosen.slot == kNone ? kNone : atomicCAS(layer_.stamp + chosen.slot, chosen.stamp, kClaimed);
  }
  /// Adds what has been claimed to the reserve.
  __device__ void add(const HeldSlot& chosen, std::int32_t stamp_before);
  /// Claims so many, and looks further.
  __device__ void refill(std::int32_t wanted) {
    const HeldSlot chosen = choose(wanted);
    add(chosen, claim(chosen));
    look();
  }
  /// Finds slots for `needed` rows, which become shared.slots; returns for how many.
  __device__ std::int32_t take_slots(std::int32_t needed);

  const LayerView& layer_;
  PrefetchShared& shared_;
  std::int32_t now_;
  std::uint32_t place_ = 0;   ///< slot of the next window
  std::int32_t at_once_ = 1;  ///< rows that a warp has in flight
  std::int32_t reserved_ = 0;
  std::int32_t fetched_ = 0;
  std::int32_t evicted_ = 0;
  bool any_free_ = false;  ///< slots: none become free in this launch
  HeldSlot seen_[kPrefetchSpread];
};

__device__ inline void RowPrefetcher::fetch(std::int32_t claimed, std::int32_t rows) {
  const bool mine = lane_index() < rows;
  if (mine) {
    shared_.rows[lane_index()] = claimed;
  }
  fetched_ += take_slots(rows);
  const RowList list{shared_.rows, shared_.slots, rows};
  RowGroup group(layer_, list, 0, rows);
  group.load(0);
  const HeldSlot chosen = choose(at_once_ - reserved_);
  const std::int32_t before = claim(chosen);
  look();
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
  add(chosen, before);
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
  for (std::int32_t i = 0; i < kPrefetchWindows && given + reserved_ < needed; ++i) {
    refill(needed - given - reserved_);
  }
  const std::int32_t held = min(reserved_, needed - given);
  if (lane_index() >= given && lane_index() < needed) {
    std::int32_t slot = kNone;
    if (lane_index() < given + held) {
      const HeldSlot& taken = shared_.reserve[reserved_ - 1 - (lane_index() - given)];
      unmap(layer_, taken.slot, taken.row);
      slot = taken.slot;
    }
    shared_.slots[lane_index()] = slot;
  }
  __syncwarp();
  reserved_ -= held;
  evicted_ += held;
  return given + held;
}

__device__ inline void RowPrefetcher::look() {
  const auto slots = static_cast<std::uint32_t>(layer_.slots);
  const auto lane = static_cast<std::uint32_t>(lane_index());
#pragma unroll
  for (std::uint32_t i = 0; i < kPrefetchSpread; ++i) {
    HeldSlot& seen = seen_[i];
    seen.slot = i * kWarp + lane < slots ? static_cast<std::int32_t>((place_ + i * kWarp + lane) % slots) : kNone;
    if (seen.slot != kNone) {
      seen.stamp = stamp_word(layer_, seen.slot).load(cuda::memory_order_relaxed);
      seen.row = host_word(layer_, seen.slot).load(cuda::memory_order_relaxed);
    }
  }
  place_ = (place_ + kPrefetchSpread * kWarp) % slots;
}

/// Each lane offers the oldest of a few slots, so that what was used last, half of a small pool, is seldom among the
/// oldest of all.
__device__ inline HeldSlot RowPrefetcher::choose(std::int32_t wanted) {
  std::int32_t age = 0;
  HeldSlot own{kNone, kFree, kNone};
#pragma unroll
  for (const HeldSlot& seen : seen_) {
    const bool there = seen.slot != kNone && seen.row >= 0 && yields_ahead(seen.stamp, now_);
    if (const std::int32_t its = there ? age_of(seen.stamp, now_) : 0; its > age) {
      age = its;
      own = seen;
    }
  }
  bool chosen = false;
  for (; wanted > 0; --wanted) {
    const std::int32_t oldest = __reduce_max_sync(kAllLanes, age);
    if (oldest == 0) {
      break;
    }
    if (lane_index() == __ffs(static_cast<int>(__ballot_sync(kAllLanes, age == oldest))) - 1) {
      chosen = true;
      age = 0;
    }
  }
  return chosen ? own : HeldSlot{kNone, kFree, kNone};
}

__device__ inline void RowPrefetcher::add(const HeldSlot& chosen, std::int32_t stamp_before) {
  const bool taken = chosen.slot != kNone && stamp_before == chosen.stamp;
  const unsigned lanes = __ballot_sync(kAllLanes, taken);
  if (taken) {
    shared_.reserve[reserved_ + rank_in(lanes)] = chosen;
  }
  __syncwarp();
  reserved_ += __popc(lanes);
}

}  // namespace echo
