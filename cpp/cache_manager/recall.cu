// recall: makes the selected rows resident and says in which slots they are. One launch, many blocks, no barrier
// between them: residency.cuh says what keeps them from each other's slots.
//
// A block takes consecutive entries of the selection, so that its misses are in order of address (positions ascend).
// Half of the warps
//   look up       three dependent loads per entry (selection, block table, slot_of) and one atomic maximum,
//   list misses   in order, in shared memory,
//   start rows    from host memory into registers, before there is a slot for them,
//   copy          those to their slots, then the rest (copy_rows.cuh),
//   wait          for rows that other blocks fetch, and write the slots of their entries;
// the other half finds slots meanwhile (claim_slots.cuh).
// The first blocks append the new rows of the pass, if kv is given (append_rows.cuh). Entries that select those wait
// for them: for blocks that started before their own.
// Cost on an H200 (bench/results/recall.json): 4.8 us for 26,624 hits; 23, 75 and 248 us with 533, 2,665 and 13,312
// misses among them.
#include <algorithm>

#include "cache_manager/copy_rows.cuh"
#include "cache_manager/recall.cuh"
#include "kernels/append_rows.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = kAppendThreads;
constexpr int kLookers = kThreads - kClaimers;
constexpr int kWarps = kLookers / kWarp;  ///< that look up and copy
constexpr int kLookBarrier = 2;           ///< theirs
constexpr int kBlocksPerSm = 2;           ///< that run together
constexpr int kMostPerThread = 8;
constexpr int kMostEntries = kMostPerThread * kLookers;  ///< of a block

struct RecallShared {
  std::int32_t missing;
  std::int32_t missing_of[kWarps];
  std::int32_t rows[kMostEntries];   ///< those missing, in the order of their entries
  std::int32_t slots[kMostEntries];  ///< and the slots that they get
  std::int32_t entries;
  std::int32_t lost;
  std::int32_t ahead;  ///< entries whose row score had fetched in this tick
  ClaimShared claim;
};

/// What recall knows of an entry of the selection.
struct Entry {
  std::int32_t row = kNone;   ///< host row, kNone where there is nothing to recall
  std::int32_t slot = kNone;  ///< kNone: to be fetched, then kListed - place in the list; kPending: others fetch it
};
constexpr std::int32_t kListed = -16;

/// Host row of an entry, kNone where there is none; `is_new`: this launch appends it.
__device__ std::int32_t selected_row(const RecallParams& p, std::int64_t entry, bool& is_new,
                                     const KernelErrorView& errors) {
  const std::int32_t position = p.selection[entry];
  const std::int32_t row = p.block.first + static_cast<std::int32_t>(entry / p.shape.top_k);
  const std::int32_t own = position_of(p.step, row, errors);
  if (own == kNone || position == kNone) {
    return kNone;
  }
  if (position < 0 || position > own) {
    errors.raise(KernelError::bad_selection);
    return kNone;
  }
  if (p.kv != nullptr) {
    const std::int32_t* appended = p.step.positions + row / p.step.query_rows * p.step.query_rows;
    for (std::int32_t i = 0; i < p.step.query_rows; ++i) {
      is_new = is_new || appended[i] == position;
    }
  }
  return host_row_of(p.layer, p.step, row, position, errors);
}

/// Looks up the host rows of a thread's entries. Each kind of access goes out for all of them before the first is
/// waited for; what is not simply resident is settled one by one. Returns how many others are fetching already; adds to
/// `ahead` those that score fetched.
template <int kPerThread>
__device__ std::int32_t look_up_all(const LayerView& layer, std::int32_t now, Entry (&entries)[kPerThread],
                                    std::int32_t& ahead) {
  std::int32_t slots[kPerThread];
  std::int32_t before[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool wanted = entries[i].row != kNone && entries[i].slot != kPending;
    slots[i] = wanted ? slot_word(layer, entries[i].row).load(cuda::memory_order_relaxed) : kNone;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    before[i] = slots[i] >= 0 ? stamp_word(layer, slots[i]).fetch_max(now, cuda::memory_order_relaxed) : now;
  }
  std::int32_t lost = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    Entry& entry = entries[i];
    if (before[i] != now && before[i] != kClaimed) {  // as in protect
      entry.slot = slots[i];
      ahead += before[i] == prefetched_at(now) ? 1 : 0;
    } else if (entry.row != kNone && entry.slot != kPending) {
      entry.slot = look_up(layer, entry.row, now, slots[i]);
      lost += entry.slot == kPending ? 1 : 0;
    }
  }
  return lost;
}

/// Lists the missing rows of all lookers; returns how many there are.
template <int kPerThread>
__device__ std::int32_t list_missing(Entry (&entries)[kPerThread], RecallShared& shared) {
  unsigned masks[kPerThread];
  std::int32_t own = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    masks[i] = __ballot_sync(kAllLanes, entries[i].row != kNone && entries[i].slot == kNone);
    own += __popc(masks[i]);
  }
  if (lane_index() == 0) {
    shared.missing_of[warp_index()] = own;
  }
  meet(kLookBarrier, kLookers);
  std::int32_t place = 0;
  std::int32_t missing = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    place += warp < warp_index() ? shared.missing_of[warp] : 0;
    missing += shared.missing_of[warp];
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if ((masks[i] >> lane_index() & 1U) != 0U) {
      const std::int32_t mine = place + __popc(masks[i] & ((1U << lane_index()) - 1U));
      shared.rows[mine] = entries[i].row;
      entries[i].slot = kListed - mine;
    }
    place += __popc(masks[i]);
  }
  return missing;
}

/// Warps that look entries up, and copy what is missing.
template <int kPerThread>
__device__ void look_up_and_copy(const RecallParams& p, std::int32_t now, std::int32_t lanes, std::int64_t first_entry,
                                 RecallShared& shared, const KernelErrorView& errors) {
  const std::int64_t entry_count = static_cast<std::int64_t>(p.block.count) * p.shape.top_k;
  const std::int64_t end = lane_index() < lanes ? entry_count : 0;
  const std::int64_t own = first_entry + warp_index() * kPerThread * lanes + lane_index();
  Entry entries[kPerThread];
  std::int32_t found = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    bool is_new = false;
    if (own + i * kWarp < end) {
      entries[i].row = selected_row(p, own + i * kWarp, is_new, errors);
    }
    entries[i].slot = is_new && entries[i].row != kNone ? kPending : kNone;
    found += entries[i].row != kNone ? 1 : 0;
  }
  std::int32_t ahead = 0;
  const std::int32_t lost = warp_sum(look_up_all(p.layer, now, entries, ahead));
  found = warp_sum(found);
  ahead = warp_sum(ahead);
  if (lane_index() == 0 && found != 0) {
    atomicAdd(&shared.entries, found);
    atomicAdd(&shared.lost, lost);
    atomicAdd(&shared.ahead, ahead);
  }
  const std::int32_t missing = list_missing(entries, shared);
  if (threadIdx.x == 0) {
    shared.missing = missing;
  }
  meet(0, kThreads);  // the list is complete
  if (missing > 0) {
    copy_rows(p.layer, {shared.rows, shared.slots, missing}, warp_index(), kWarps, [] { meet(0, kThreads); });
  }

  bool failed = false;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    Entry& entry = entries[i];
    if (entry.slot <= kListed) {
      entry.slot = shared.slots[kListed - entry.slot];
    } else if (entry.slot == kPending) {
      entry.slot = wait_for(p.layer, entry.row, now);
    }
    failed = failed || (entry.row != kNone && entry.slot == kNone);
    if (own + i * kWarp < end) {
      p.slots[own + i * kWarp] = entry.slot;
    }
  }
  if (failed) {
    errors.raise(KernelError::pool_exhausted);
  }
}

/// The other warps.
__device__ void find_slots(const RecallParams& p, std::int32_t now, const ClaimPlace& place, std::int32_t claimer,
                           RecallShared& shared) {
  const RowScores scores = row_scores(p);
  const Sight ahead = look_ahead(p.layer, scores, now, place, claimer);
  if (claimer == 0) {
    shared.claim.free = AtomicWord(p.layer.replacement->free).load(cuda::memory_order_relaxed);
  }
  meet(0, kThreads);
  const std::int32_t missing = shared.missing;
  std::int32_t evicted = 0;
  if (missing > 0) {
    evicted =
        claim_slots(p.layer, scores, now, place, claimer, ahead, shared.rows, shared.slots, missing, shared.claim);
    meet(0, kThreads);
    publish_slots(p.layer, now, claimer, shared.rows, shared.slots, shared.claim.given);
  }
  if (claimer == 0) {
    count(&p.layer.counters->hits, shared.entries - missing);
    count(&p.layer.counters->misses, missing == 0 ? 0 : shared.claim.given);
    count(&p.layer.counters->evictions, evicted);
    count(&p.layer.counters->lost_races, shared.lost);
    count(&p.layer.counters->prefetched_used, shared.ahead);
  }
}

/// `lanes` of each warp have entries, kPerThread each.
template <int kPerThread>
__global__ __launch_bounds__(kThreads, kBlocksPerSm) void recall(RecallParams p, std::int32_t append_blocks,
                                                                 std::int32_t lanes, KernelErrorView errors) {
  __shared__ union Shared {
    __device__ Shared() {}
    RecallShared recall;
    AppendShared append;
  } shared;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  const ClaimPlace place = claim_place(p.layer, now, block, static_cast<std::int32_t>(gridDim.x));
  if (block < append_blocks) {
    const AppendParams append{.layer = p.layer,
                              .step = p.step,
                              .shape = p.shape,
                              .kv = p.kv,
                              .kv_dtype = p.kv_dtype,
                              .index_key = nullptr,
                              .index_key_dtype = DType::f32,
                              .to_slots = true};
    append_rows(append, row_scores(p), now, place, block * kAppendRows, shared.append, errors);
    return;
  }
  if (threadIdx.x == 0) {
    shared.recall.entries = 0;
    shared.recall.lost = 0;
    shared.recall.ahead = 0;
  }
  __syncthreads();
  if (threadIdx.x < kLookers) {
    const std::int64_t first = static_cast<std::int64_t>(block - append_blocks) * kPerThread * kWarps * lanes;
    look_up_and_copy<kPerThread>(p, now, lanes, first, shared.recall, errors);
  } else {
    find_slots(p, now, place, static_cast<std::int32_t>(threadIdx.x) - kLookers, shared.recall);
  }
}

template <int kPerThread>
void launch_sized(const RecallParams& params, std::int32_t lanes, const LaunchContext& context) {
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  const unsigned append_blocks = params.kv == nullptr ? 0U : blocks_for(params.step.rows, kAppendRows);
  launch(context, recall<kPerThread>, append_blocks + blocks_for(entries, kPerThread * kWarps * lanes), kThreads, 0,
         params, static_cast<std::int32_t>(append_blocks), lanes, context.errors);
}

}  // namespace

void launch_recall(const RecallParams& params, const LaunchContext& context) {
  // As few entries per warp as still lets all blocks run together; two blocks on a multiprocessor only where the
  // alternative is more than one entry per thread.
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  std::int64_t each = (entries - 1) / (context.multiprocessors * kWarps) + 1;
  if (each > kWarp) {
    each = (each - 1) / kBlocksPerSm + 1;
  }
  if (each <= kWarp / 2) {
    launch_sized<1>(params, kWarp / 2, context);
  } else if (each <= kWarp) {
    launch_sized<1>(params, kWarp, context);
  } else if (each <= 2 * kWarp) {
    launch_sized<2>(params, kWarp, context);
  } else if (each <= 4 * kWarp) {
    launch_sized<4>(params, kWarp, context);
  } else {
    launch_sized<kMostPerThread>(params, kWarp, context);
  }
}

}  // namespace echo
