#pragma once
// look_up_rows: which host rows the entries of a selection name, whether they are resident, and a list of those that
// are not. By the first warps of a block, each thread for a few entries.
//
// An entry takes four accesses that depend on each other: selection, block table, slot_of, and an atomic operation that
// protects the slot of a row that is resident, or says who fetches one that is not. Each of them goes out for all
// entries of a thread before the first is waited for. Cost: 2 us on an H200 where all of it comes from HBM.

#include "cache_manager/residency.cuh"
#include "kernels/kernel_errors.hpp"
#include "kernels/params.hpp"
#include "kernels/warp.cuh"

namespace echo {

/// What recall knows of an entry of the selection.
struct Entry {
  std::int32_t row = kNone;  ///< host row, kNone where there is nothing to recall
  /// kNone: to be fetched, then kFirstListed - place in the list; kPending: others fetch it.
  std::int32_t slot = kNone;
};
inline constexpr std::int32_t kFirstListed = -16;

/// Consecutive entries of a warp, kPerThread of each of its first `lanes` lanes.
template <int kPerThread>
struct OwnEntries {
  std::int64_t first;             ///< of this lane; the next ones are kWarp apart
  std::int32_t rows[kPerThread];  ///< of the pass that they belong to, kNone beyond the last entry

  /// Of warp `warp` of the grid.
  __device__ OwnEntries(const RecallParams& p, std::int64_t warp, std::int32_t lanes)
      : first(warp * kPerThread * lanes + lane_index()) {
    const std::int64_t count = static_cast<std::int64_t>(p.block.count) * p.shape.top_k;
    const auto row = static_cast<std::int32_t>(first / p.shape.top_k);
    const auto rest = static_cast<std::int32_t>(first - static_cast<std::int64_t>(row) * p.shape.top_k);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool any = lane_index() < lanes && first + i * kWarp < count;
      rows[i] = any ? p.block.first + row + (rest + i * kWarp) / p.shape.top_k : kNone;
    }
  }

  __device__ bool has(int i) const { return rows[i] != kNone; }
};

/// Host rows of the entries. What lies outside of the cache is reported and left out.
template <int kPerThread>
__device__ void read_selection(const RecallParams& p, const OwnEntries<kPerThread>& own, Entry (&entries)[kPerThread],
                               const KernelErrorView& errors) {
  std::int32_t positions[kPerThread];
  std::int32_t lasts[kPerThread];  // positions of the query rows
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    positions[i] = own.has(i) ? p.selection[own.first + i * kWarp] : kNone;
    lasts[i] = own.has(i) ? p.step.positions[own.rows[i]] : kNone;
  }
  const std::int64_t context = static_cast<std::int64_t>(p.step.table_stride) * kTokensPerBlock;
  bool bad_selection = false;
  bool bad_position = false;
  std::int32_t blocks[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool outside = lasts[i] != kNone && (lasts[i] < 0 || lasts[i] >= context);
    const bool named = lasts[i] != kNone && !outside && positions[i] != kNone;
    const bool right = named && positions[i] >= 0 && positions[i] <= lasts[i];
    bad_position = bad_position || outside;
    bad_selection = bad_selection || (named && !right);
    const std::int64_t table = static_cast<std::int64_t>(own.rows[i] / p.step.query_rows) * p.step.table_stride;
    blocks[i] = right ? p.step.block_table[table + positions[i] / kTokensPerBlock] : kNone;
    positions[i] = right ? positions[i] : kNone;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool right = blocks[i] >= 0 && blocks[i] < p.layer.host_rows / kTokensPerBlock;
    bad_position = bad_position || (positions[i] != kNone && !right);
    entries[i].row = right ? host_row(blocks + i, positions[i] % kTokensPerBlock) : kNone;
  }
  if (bad_selection) {
    errors.raise(KernelError::bad_selection);
  }
  if (bad_position) {
    errors.raise(KernelError::bad_position);
  }
}

/// Of the entries of a thread or a warp.
struct LookUpCounts {
  std::int32_t lost;   ///< those whose row another thread was fetching already
  std::int32_t ahead;  ///< those for whose row score had fetched it in this tick, and nobody had used it
};

/// Looks up the host rows of a thread's entries, as look_up does; what is neither simply resident nor simply missing is
/// settled one by one. New rows of the pass are hits like others.
template <int kPerThread>
__device__ LookUpCounts look_up_all(const LayerView& layer, std::int32_t now, Entry (&entries)[kPerThread]) {
  std::int32_t slots[kPerThread];
  std::int32_t before[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    slots[i] = kPending;
    if (entries[i].row != kNone) {
      slots[i] = slot_word(layer, entries[i].row).load(cuda::memory_order_relaxed);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    before[i] = slots[i];
    if (slots[i] >= 0) {
      before[i] = stamp_word(layer, slots[i]).fetch_max(now, cuda::memory_order_relaxed);
    } else if (slots[i] != kPending && slots[i] != failed_at(now)) {  // leaves in before what there was
      slot_word(layer, entries[i].row).compare_exchange_strong(before[i], kPending, cuda::memory_order_relaxed);
    }
  }
  LookUpCounts counts{};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    Entry& entry = entries[i];
    const bool hit = slots[i] >= 0 && before[i] != now && before[i] != kClaimed;  // as in protect
    const bool missing = slots[i] < 0 && slots[i] != kPending && slots[i] != failed_at(now) && before[i] == slots[i];
    if (hit) {
      entry.slot = slots[i];
      counts.ahead += before[i] == prefetched_at(now) ? 1 : 0;
    } else if (!missing && entry.row != kNone) {
      entry.slot = look_up(layer, entry.row, now, slots[i] >= 0 ? slots[i] : before[i]);
      counts.lost += entry.slot == kPending ? 1 : 0;
    }
  }
  return counts;
}

struct LookUpSums {
  std::int32_t missing;
  std::int32_t found;  ///< entries that name a row
  LookUpCounts counts;
};

/// Shared memory of kWarps warps that look up kMost entries at most.
template <int kWarps, int kMost>
struct LookUpShared {
  LookUpSums sums_of[kWarps];
  std::int32_t rows[kMost];   ///< those missing, in the order of their entries
  std::int32_t slots[kMost];  ///< that they get, kNone at first

  __device__ LookUpSums sums() const {
    LookUpSums sums{};
#pragma unroll
    for (const LookUpSums& warp : sums_of) {
      sums.missing += warp.missing;
      sums.found += warp.found;
      sums.counts.lost += warp.counts.lost;
      sums.counts.ahead += warp.counts.ahead;
    }
    return sums;
  }
};

/// Lists the missing rows of all lookers, who meet at `barrier`; returns how many there are.
template <int kPerThread, int kWarps, int kMost>
__device__ std::int32_t list_missing(Entry (&entries)[kPerThread], LookUpCounts counts, int barrier,
                                     LookUpShared<kWarps, kMost>& shared) {
  unsigned masks[kPerThread];
  std::int32_t own = 0;
  std::int32_t found = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    masks[i] = __ballot_sync(kAllLanes, entries[i].row != kNone && entries[i].slot == kNone);
    own += __popc(masks[i]);
    found += __popc(__ballot_sync(kAllLanes, entries[i].row != kNone));
  }
  counts = {.lost = __reduce_add_sync(kAllLanes, counts.lost), .ahead = __reduce_add_sync(kAllLanes, counts.ahead)};
  if (lane_index() == 0) {
    shared.sums_of[warp_index()] = {.missing = own, .found = found, .counts = counts};
  }
  meet(barrier, kWarps * kWarp);
  std::int32_t place = 0;
  std::int32_t missing = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    place += warp < warp_index() ? shared.sums_of[warp].missing : 0;
    missing += shared.sums_of[warp].missing;
  }
  if (missing == 0) {
    return 0;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if ((masks[i] >> lane_index() & 1U) != 0U) {
      const std::int32_t mine = place + __popc(masks[i] & ((1U << lane_index()) - 1U));
      shared.rows[mine] = entries[i].row;
      shared.slots[mine] = kNone;
      entries[i].slot = kFirstListed - mine;
    }
    place += __popc(masks[i]);
  }
  return missing;
}

}  // namespace echo
