#pragma once
// look_up_rows: which host rows the entries of a selection name, whether they are resident, and a list of those that
// are not. By the first warps of a block, each thread for a few entries.
//
// An entry takes four accesses that depend on each other: selection, block table, slot_of, and an atomic operation that
// protects the slot of a row that is resident, or says who fetches one that is not. Each of them goes out for all
// entries of a thread before the first is waited for. Cost: 2 us on an H200 where all of it comes from HBM. The block
// table is read into shared memory before there is a selection (NearTable), which saves 0.1 to 0.25 us.

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

  __device__ bool missing() const { return row != kNone && slot == kNone; }
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

/// The beginning of one session's block table, in shared memory.
struct NearTable {
  static constexpr std::int32_t kMost = 2048;  ///< host blocks: 131,072 tokens

  std::int32_t first_row;  ///< of the pass, of that session
  std::int32_t blocks[kMost];

  /// A row's block of that index, kNone unless it is `wanted`.
  __device__ std::int32_t block(const StepView& step, std::int32_t row, std::int32_t index, bool wanted) const {
    const bool near = wanted && index < kMost &&
                      static_cast<std::uint32_t>(row - first_row) < static_cast<std::uint32_t>(step.query_rows);
    std::int32_t block = blocks[near ? index : 0];  // in no branch, which takes longer than what it spares
    if (wanted && !near) {
      block = step.block_table[static_cast<std::int64_t>(row / step.query_rows) * step.table_stride + index];
    }
    return wanted ? block : kNone;
  }
};

/// By the kWarps first warps of a block, which have `of_warp` entries each: the table of the first of these, to be used
/// behind a barrier. May come before the kernel ahead has ended.
template <int kWarps>
__device__ void bring_table(const RecallParams& p, std::int32_t block, std::int32_t of_warp, NearTable& near) {
  const std::int64_t first = static_cast<std::int64_t>(block) * kWarps * of_warp;
  const std::int32_t entry = (p.block.first + static_cast<std::int32_t>(first / p.shape.top_k)) / p.step.query_rows;
  const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(entry) * p.step.table_stride;
#pragma unroll
  for (int done = 0; done < NearTable::kMost; done += kWarps * kWarp) {
    const std::int32_t index = done + static_cast<std::int32_t>(threadIdx.x);
    if (index < p.step.table_stride) {
      near.blocks[index] = table[index];
    }
  }
  if (threadIdx.x == 0) {
    near.first_row = entry * p.step.query_rows;
  }
}

/// Host rows of the entries. What lies outside of the cache is reported and left out.
template <int kPerThread>
__device__ void read_selection(const RecallParams& p, const NearTable& near, const OwnEntries<kPerThread>& own,
                               Entry (&entries)[kPerThread], const KernelErrorView& errors) {
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
    blocks[i] = near.block(p.step, own.rows[i], positions[i] / kTokensPerBlock, right);
    positions[i] = right ? positions[i] : kNone;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool right = blocks[i] >= 0 && blocks[i] < p.layer.host_rows / kTokensPerBlock;
    bad_position = bad_position || (positions[i] != kNone && !right);
    entries[i] = {.row = right ? host_row(blocks + i, positions[i] % kTokensPerBlock) : kNone, .slot = kNone};
  }
  if (bad_selection) {
    errors.raise(KernelError::bad_selection);
  }
  if (bad_position) {
    errors.raise(KernelError::bad_position);
  }
}

/// Of the entries of a thread, a warp or a block.
struct LookUpCounts {
  std::int32_t found;  ///< those that name a row
  std::int32_t lost;   ///< those whose row another thread was fetching already
  std::int32_t ahead;  ///< those whose row had been fetched ahead, and nobody had used it

  // Where there are forecasts, `ahead` is two numbers.
  /// Of the row of a slot with that stamp.
  template <bool kForecasts>
  __device__ static std::int32_t ahead_of(std::int32_t stamp, std::int32_t now) {
    return stamp == prefetched_at(now) ? 1 : (kForecasts && is_forecast(stamp) ? 1 << 16 : 0);
  }
  /// By score in this tick.
  template <bool kForecasts>
  __device__ std::int32_t prefetched() const {
    return kForecasts ? ahead & 0xFFFF : ahead;
  }
  /// By a forecast, whenever.
  __device__ std::int32_t forecast() const { return ahead >> 16; }
};

/// What slot_of says of a thread's entries, and what their atomic operations found.
template <int kPerThread>
struct SlotsSeen {
  std::int32_t slots[kPerThread];   ///< kPending where there is nothing to look up, or no slot to be had in this call
  std::int32_t before[kPerThread];  ///< in the stamp of a slot, else in slot_of

  /// At first sight.
  __device__ bool missing(int i) const { return slots[i] < 0 && slots[i] != kPending; }
  /// Any of a warp's entries.
  __device__ bool any_missing() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      any = any || missing(i);
    }
    return __any_sync(kAllLanes, any) != 0;
  }
};

template <int kPerThread>
__device__ SlotsSeen<kPerThread> look_at_slots(const LayerView& layer, std::int32_t now,
                                               const Entry (&entries)[kPerThread]) {
  SlotsSeen<kPerThread> seen;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    seen.slots[i] = kPending;
    if (entries[i].row != kNone) {
      seen.slots[i] = slot_word(layer, entries[i].row).load(cuda::memory_order_relaxed);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    seen.slots[i] = seen.slots[i] == failed_at(now) ? kPending : seen.slots[i];
    seen.before[i] = seen.slots[i];
    if (seen.slots[i] >= 0) {
      seen.before[i] = stamp_word(layer, seen.slots[i]).fetch_max(now, cuda::memory_order_relaxed);
    } else if (seen.slots[i] != kPending) {  // leaves in before what there was
      slot_word(layer, entries[i].row).compare_exchange_strong(seen.before[i], kPending, cuda::memory_order_relaxed);
    }
  }
  return seen;
}

/// Looks up the host rows of a thread's entries, as look_up does, given what was seen; what is neither simply resident
/// nor simply missing is settled one by one. New rows of the pass are hits like others.
template <bool kForecasts, int kPerThread>
__device__ LookUpCounts look_up_all(const LayerView& layer, std::int32_t now, const SlotsSeen<kPerThread>& seen,
                                    Entry (&entries)[kPerThread]) {
  LookUpCounts counts{};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    Entry& entry = entries[i];
    const std::int32_t before = seen.before[i];
    counts.found += entry.row != kNone ? 1 : 0;
    const bool hit = seen.slots[i] >= 0 && before != now && before != kClaimed;  // as in protect
    const bool fetches = seen.missing(i) && before == seen.slots[i];
    if (hit) {
      entry.slot = seen.slots[i];
      counts.ahead += LookUpCounts::ahead_of<kForecasts>(before, now);
    } else if (!fetches && entry.row != kNone) {
      entry.slot = look_up(layer, entry.row, now, seen.slots[i] >= 0 ? seen.slots[i] : before);
      counts.lost += entry.slot == kPending ? 1 : 0;
    }
  }
  return counts;
}

/// Rows that a block has to fetch.
struct Missing {
  std::int32_t rows;
  std::int32_t early;  ///< of them, the first ones: they are on their way
};

/// Shared memory of kWarps warps that look up kMost entries at most.
template <int kWarps, int kMost>
struct LookUpShared {
  std::int32_t missing_of[kWarps];
  std::int32_t early_of[kWarps];
  LookUpCounts counts_of[kWarps];
  std::int32_t rows[kMost];   ///< those missing, in the order of their entries, those on their way first
  std::int32_t slots[kMost];  ///< that they get, kNone at first

  __device__ Missing missing() const {
    Missing missing{};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      missing.rows += missing_of[warp];
      missing.early += early_of[warp];
    }
    return missing;
  }
  __device__ LookUpCounts counts() const {
    LookUpCounts sums{};
    for (const LookUpCounts& counts : counts_of) {
      sums.found += counts.found;
      sums.lost += counts.lost;
      sums.ahead += counts.ahead;
    }
    return sums;
  }
};

/// Lists the missing rows of all lookers, who meet at `barrier`. `is_early(i)`: whether entry i of this lane is on its
/// way.
template <int kPerThread, int kWarps, int kMost, typename IsEarly>
__device__ Missing list_missing(Entry (&entries)[kPerThread], const LookUpCounts& counts, const IsEarly& is_early,
                                int barrier, LookUpShared<kWarps, kMost>& shared) {
  unsigned early[kPerThread];
  unsigned later[kPerThread];
  Missing own{};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool missing = entries[i].missing();
    early[i] = __ballot_sync(kAllLanes, missing && is_early(i));
    later[i] = __ballot_sync(kAllLanes, missing && !is_early(i));
    own.early += __popc(early[i]);
    own.rows += __popc(early[i] | later[i]);
  }
  const LookUpCounts sums{.found = __reduce_add_sync(kAllLanes, counts.found),
                          .lost = __reduce_add_sync(kAllLanes, counts.lost),
                          .ahead = __reduce_add_sync(kAllLanes, counts.ahead)};
  if (lane_index() == 0) {
    shared.missing_of[warp_index()] = own.rows;
    shared.early_of[warp_index()] = own.early;
    shared.counts_of[warp_index()] = sums;
  }
  meet(barrier, kWarps * kWarp);
  const Missing all = shared.missing();
  if (all.rows == 0) {
    return all;
  }
  std::int32_t place_of_early = 0;
  std::int32_t place_of_later = all.early;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    place_of_early += warp < warp_index() ? shared.early_of[warp] : 0;
    place_of_later += warp < warp_index() ? shared.missing_of[warp] - shared.early_of[warp] : 0;
  }
  const unsigned below = (1U << lane_index()) - 1U;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool goes_first = (early[i] >> lane_index() & 1U) != 0U;
    if (((early[i] | later[i]) >> lane_index() & 1U) != 0U) {
      const std::int32_t mine =
          goes_first ? place_of_early + __popc(early[i] & below) : place_of_later + __popc(later[i] & below);
      shared.rows[mine] = entries[i].row;
      shared.slots[mine] = kNone;
      entries[i].slot = kFirstListed - mine;
    }
    place_of_early += __popc(early[i]);
    place_of_later += __popc(later[i]);
  }
  return all;
}

}  // namespace echo
