#pragma once
// EarlyRows: rows that a warp of recall loads from host memory before they have slots.
//
// That it fetches a row a warp knows from an atomic operation, a barrier and a list before it has a slot. The first few
// rows are loaded meanwhile, into registers. Where much is missing, only the first blocks do so: rows travel in order
// of address (copy_rows.cuh), and no more at once than keep the link busy. On an H200 a call of one session with 41
// misses takes 5.2 us; when it took 5.5, it was 8.4 with nothing loaded before slots are there.
//
// Reads of the host hold up what a multiprocessor does next. So they begin behind the atomic operations of their warp:
// before these a call of 13 sessions with 533 misses took 29 us instead of 19.7. (The loads must not stand in a branch
// of their own: the compiler has the warp wait for them where it ends, which costs 2 us. So it does where it looks at
// the result of an atomic operation that is under way with them: what is loaded depends on these results.)

#include "cache_manager/copy_rows.cuh"
#include "cache_manager/look_up_rows.cuh"

namespace echo {

inline constexpr std::int32_t kMostEarly = 3;  ///< rows of a warp
/// Of a warp, with entries: a single session leaves attention multiprocessors of its own.
inline constexpr std::int32_t kLeastLanes = 4;
inline constexpr int kEarlyEntries = 2;  ///< of a thread, in which they are looked for
/// Registers do not suffice for more entries and rows that are under way.
template <int kPerThread>
inline constexpr bool kLoadsEarly = kPerThread <= 4;

/// Of a warp, in shared memory.
struct EarlyShared {
  std::int32_t rows[kMostEarly];
  std::int32_t slots[kMostEarly];
};

/// Entries of a warp, the first kEarlyEntries of each thread, as bits of lanes.
struct EntryMasks {
  unsigned of[kEarlyEntries];

  __device__ bool has(int i) const { return i < kEarlyEntries && (of[i] >> lane_index() & 1U) != 0U; }
  __device__ std::int32_t count() const {
    std::int32_t all = 0;
#pragma unroll
    for (const unsigned lanes : of) {
      all += __popc(lanes);
    }
    return all;
  }
  /// How many there are before entry i of this lane.
  __device__ std::int32_t place(int i) const {
    std::int32_t before = __popc(of[i] & ((1U << lane_index()) - 1U));
#pragma unroll
    for (int j = 0; j < i; ++j) {
      before += __popc(of[j]);
    }
    return before;
  }
};

/// By one warp: which of its entries it loads, listed in shared memory. `warps`: of a block that do so; `lanes`: of the
/// warp that have entries.
template <int kPerThread>
__device__ EntryMasks choose_early(const LayerView& layer, const Entry (&entries)[kPerThread],
                                   const SlotsSeen<kPerThread>& seen, const CopyQueue& queue, std::int32_t warps,
                                   std::int32_t lanes, EarlyShared& shared) {
  EntryMasks early{};
  if constexpr (!kLoadsEarly<kPerThread>) {
    return early;
  }
  constexpr int kEntries = kPerThread < kEarlyEntries ? kPerThread : kEarlyEntries;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    early.of[i] = __ballot_sync(kAllLanes, seen.missing(i));
  }
  if (kPerThread <= 2 && early.count() == 0) {
    return early;
  }
  // More than half of a warp's few entries: so much is missing that it would hold up finding slots.
  if (kPerThread == 1 && lanes <= kLeastLanes && 2 * early.count() > lanes) {
    return {};
  }
  const std::int32_t pieces = max(1, layer.row_bytes / RowGroup::kPieceBytes);
  const std::int32_t wanted = min(min(early.count(), kMostEarly), max(1, RowGroup::kRound / pieces));
  const std::int32_t blocks = kCopyRowsAtOnce / warps;  // in which each warp may have a row under way
  const std::int32_t in_all = blocks / queue.blocks;    // rows, in all blocks
  const std::int32_t most = queue.place * wanted < blocks ? wanted : min(wanted, in_all > 1 ? in_all : 0);
  bool chosen[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    chosen[i] = early.has(i) && early.place(i) < most;
    if (chosen[i]) {
      shared.rows[early.place(i)] = entries[i].row;
    }
  }
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    early.of[i] = __ballot_sync(kAllLanes, chosen[i]);
  }
  __syncwarp();
  return early;
}

/// The same entries once it is certain that this warp fetches them, none if it does not fetch all of them.
template <int kPerThread>
__device__ EntryMasks settled(const EntryMasks& early, const SlotsSeen<kPerThread>& seen) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < kEarlyEntries && i < kPerThread; ++i) {
    const bool claimed = early.has(i) && seen.before[i] == seen.slots[i];
    all = all && __ballot_sync(kAllLanes, claimed) == early.of[i];
  }
  EntryMasks certain{};
#pragma unroll
  for (int i = 0; i < kEarlyEntries; ++i) {
    certain.of[i] = all ? early.of[i] : 0U;
  }
  return certain;
}

}  // namespace echo
