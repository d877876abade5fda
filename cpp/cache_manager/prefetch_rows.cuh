#pragma once
// RowPrefetcher: one warp of each thread block of score fetches rows ahead that recall will probably want
// (residency.cuh: the protocol, and what it leaves out here).
//
// Rows that are found missing wait in a short list. As many as a warp has in flight at once go together: a share of the
// call's budget, the rows by compare-and-swap on slot_of, their bytes from host memory into registers, slots meanwhile
// (free ones, else the oldest of a window of 32; the scores that recall's rule would look at are only being computed),
// bytes to the slots, maps. Whatever is busy or used up is left to recall: nobody waits for anybody.
// Cost: five dependent accesses and a host read, some 10 us for each few rows while score takes all of the memory's
// speed; so 132 warps fetch about 25 rows per us.

#include <algorithm>

#include "cache_manager/copy_rows.cuh"
#include "cache_manager/residency.cuh"

namespace echo {

inline constexpr std::int32_t kPrefetchAtOnce = 8;   ///< rows that go together, at most
inline constexpr std::int32_t kPrefetchWindows = 4;  ///< looked at for them, at most
inline constexpr std::int32_t kMissingRows = kPrefetchAtOnce + kWarp;

struct PrefetchShared {
  std::int32_t missing[kMissingRows];
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
  __device__ RowPrefetcher(const LayerView& layer, std::int32_t now, PrefetchBudget budget, PrefetchShared& shared)
      : layer_(layer), shared_(shared), budget_(budget), now_(now) {
    constexpr std::uint32_t kScatter = 0x9E3779B1U;  // as in claim_place, but half a pool away from those places
    const auto slots = static_cast<std::uint32_t>(layer.slots);
    const std::uint32_t share = max(slots / gridDim.x, std::uint32_t{kWarp});
    place_ = (static_cast<std::uint32_t>(now) * kScatter + blockIdx.x * share + slots / 2U) % slots;
    const std::int32_t pieces = max(layer.row_bytes / RowGroup::kPieceBytes, 1);
    at_once_ = min(max(RowGroup::kRound / pieces, 1), kPrefetchAtOnce);
  }

  /// Rows that wait to be fetched.
  __device__ std::int32_t waiting() const { return waiting_; }
  /// Whether there are as many as go together.
  __device__ bool ready() const { return waiting_ >= at_once_; }

  /// Puts a row of each lane (kNone: nothing) on the list if it is missing. Not where enough are waiting.
  __device__ void add(std::int32_t row) {
    const bool missing = row != kNone && slot_word(layer_, row).load(cuda::memory_order_relaxed) == kNone;
    const unsigned lanes = __ballot_sync(kAllLanes, missing);
    if (missing) {
      shared_.missing[waiting_ + rank_in(lanes)] = row;
    }
    waiting_ += __popc(lanes);
    __syncwarp();
  }

  /// Fetches the last few rows of the list.
  __device__ void fetch();

  /// Adds what was done to the layer's counters; `lost` rows were never looked at.
  __device__ void report(std::int32_t lost) const {
    if (lane_index() == 0) {
      count(layer_.counters->prefetched, fetched_);
      count(layer_.counters->prefetches_capped, capped_ + lost);
      count(layer_.counters->evictions, evicted_);
    }
  }

 private:
  __device__ static void count(std::int64_t& counter, std::int32_t number) {
    if (number != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(number));
    }
  }

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
  std::int32_t waiting_ = 0;
  std::int32_t fetched_ = 0;
  std::int32_t evicted_ = 0;
  std::int32_t capped_ = 0;
  bool exhausted_ = false;  ///< the budget, so nobody needs to ask again
};

__device__ inline void RowPrefetcher::fetch() {
  const std::int32_t wanted = min(waiting_, at_once_);
  waiting_ -= wanted;
  if (exhausted_) {
    capped_ += wanted;
    return;
  }
  // The budget is asked while rows are claimed.
  const std::int32_t used = lane_index() == 0 ? atomicAdd(budget_.used, wanted) : 0;
  const std::int32_t listed = lane_index() < wanted ? shared_.missing[waiting_ + lane_index()] : kNone;
  const bool claimed = listed != kNone && claim_row(layer_, listed);
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
  for (std::int32_t round = RowGroup::kRound; round < group.total(); round += RowGroup::kRound) {
    group.load(round);
    group.store(round);
  }
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
    // Others may have emptied the stack since; nobody pushes in this launch, so what is below zero is nothing.
    top = atomicSub(&layer_.replacement->free, needed);
    if (top < needed) {
      atomicMax(&layer_.replacement->free, 0);
    }
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

/// From the next window, for rows `given` and those behind it; returns for how many.
__device__ inline std::int32_t RowPrefetcher::take_oldest(std::int32_t given, std::int32_t needed) {
  const auto slots = static_cast<std::uint32_t>(layer_.slots);
  const auto lane = static_cast<std::uint32_t>(lane_index());
  const auto slot = static_cast<std::int32_t>((place_ + lane) % slots);
  place_ = (place_ + kWarp) % slots;
  std::int32_t stamp = kFree;
  std::int32_t row = kNone;
  if (lane < slots) {
    stamp = stamp_word(layer_, slot).load(cuda::memory_order_relaxed);
    row = host_word(layer_, slot).load(cuda::memory_order_relaxed);
  }
  std::int32_t age = row >= 0 && yields_ahead(stamp, now_) ? age_of(stamp, now_) : 0;
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
