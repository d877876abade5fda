// recall: makes the selected rows resident and says in which slots they are. One launch, many blocks, no barrier
// between them: residency.cuh says what keeps them from each other's slots.
// Cost on an H200 (bench/results/recall.json): 2.8 us for 2,048 hits, 3.5 for 26,624; 20, 64 and 209 us with 533, 2,665
// and 13,312 misses among the latter. docs/measurements/recall.md has what that is made of, layer.md the timeline.
//
// A block takes consecutive entries of the selection, so that its misses are in order of address (positions ascend).
// Half of its warps look up what the entries name (look_up_rows.cuh) and write the slots of hits. They begin to load a
// few missing rows from the host before it is certain that these are the block's (early_rows.cuh), list what is missing
// in shared memory, in order, and copy those rows to the slots that they got: the early ones at once, others when it is
// the block's turn (copy_rows.cuh). Then they wait for rows that other blocks fetch. The other half finds slots
// meanwhile (claim_slots.cuh), leaves a hint (leave_hint.cuh), and helps to copy. The first blocks write the new rows
// of the pass, if kv is given (append_rows.cuh). Those have slots since begin, and entries that select them are hits.
// The launch may overlap the end of the kernel before it: meanwhile new rows are written, claimers look at their
// windows and fetch what will be looked up into the L2 cache (prefetch_maps.cuh), and lookers read a block table, as
// nothing of that depends on the selection. Attention may begin once the selection is there.
#include <algorithm>

#include "cache_manager/claim_slots.cuh"
#include "cache_manager/copy_rows.cuh"
#include "cache_manager/early_rows.cuh"
#include "cache_manager/leave_hint.cuh"
#include "cache_manager/look_up_rows.cuh"
#include "cache_manager/prefetch_maps.cuh"
#include "cache_manager/recall.cuh"
#include "kernels/append_rows.cuh"
#include "kernels/launch.cuh"
#include "kernels/ptx/copy.cuh"

namespace echo {
namespace {

constexpr int kThreads = 512;
constexpr int kAllWarps = kThreads / kWarp;
constexpr int kLookers = kThreads - kClaimers;
constexpr int kLookWarps = kLookers / kWarp;
constexpr int kBlocksPerSm = 2;  ///< that run together
constexpr int kMostPerThread = 8;
constexpr int kMostEntries = kMostPerThread * kLookers;  ///< of a block
/// Warps that write a new row, as far as those of all rows fill no more blocks than the latter: a single warp takes 6.4
/// us for an FP8 row.
constexpr std::int32_t kMostRowParts = Fp8Quarter::kCount;
constexpr std::int32_t kFullAppendBlocks = 8;

/// Whether a warp that misses nothing has its own code, with nothing between that it passes over: what is not next has
/// to be fetched first. Registers do not suffice for more entries.
template <int kPerThread>
inline constexpr bool kShortWay = kPerThread <= 2;

// Barriers of a block, apart from the claimers' own.
constexpr int kSlotsFound = 0;
constexpr int kLookBarrier = 2;  ///< of the lookers
constexpr int kListed = 3;       ///< the claimers wait for the lookers
constexpr int kOwnTurn = 4;      ///< to copy

struct RecallShared {
  NearTable table;
  LookUpShared<kLookWarps, kMostEntries> look_up;
  EarlyShared early[kLookWarps];
  ClaimShared claim;
  CopyShared copy;
};

__device__ std::int32_t tick_of(const RecallParams& p) { return *p.step.tick + p.block.tick_offset; }

/// Copies what is not on its way, or has nothing to. By all warps, once slots are found.
__device__ void copy_others(const LayerView& layer, RecallShared& shared, const Missing& missing,
                            const CopyQueue& queue) {
  const std::int32_t early = missing.early;
  if (missing.rows == early) {
    if (threadIdx.x == 0) {
      queue.leave();
    }
    return;
  }
  const RowList others{shared.look_up.rows + early, shared.look_up.slots + early, missing.rows - early};
  const Copy copy(layer, others, queue, kAllWarps);
  if (!copy.begins_at_once()) {
    if (threadIdx.x == 0) {
      copy.wait();
    }
    meet(kOwnTurn, kThreads);
  }
  copy.copy(shared.copy);
}

/// Writes the slots of rows that other blocks fetch, once they have any.
template <int kPerThread>
__device__ void wait_for_others(const RecallParams& p, std::int32_t now, const OwnEntries<kPerThread>& own,
                                Entry (&entries)[kPerThread], const KernelErrorView& errors) {
  bool failed = false;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (entries[i].slot == kPending) {
      entries[i].slot = wait_for(p.layer, entries[i].row, now);
      p.slots[own.first + i * kWarp] = entries[i].slot;
    }
    failed = failed || (entries[i].row != kNone && entries[i].slot == kNone);
  }
  if (failed) {
    errors.raise(KernelError::pool_exhausted);
  }
}

/// Looks up, given what was seen, writes the slots of hits, and lists what is missing. `is_early(i)`: entry i of this
/// lane is on its way.
template <bool kForecasts, int kPerThread, typename IsEarly>
__device__ Missing settle(const RecallParams& p, std::int32_t now, const OwnEntries<kPerThread>& own,
                          const SlotsSeen<kPerThread>& seen, const IsEarly& is_early, RecallShared& shared,
                          Entry (&entries)[kPerThread]) {
  const LookUpCounts counts = look_up_all<kForecasts>(p.layer, now, seen, entries);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (own.has(i) && (entries[i].slot >= 0 || entries[i].row == kNone)) {
      p.slots[own.first + i * kWarp] = entries[i].slot;
    }
  }
  return list_missing(entries, counts, is_early, kLookBarrier, shared.look_up);
}

/// Fetches what is listed, with the claimers. `store_early()`: stores what is on its way, once entries have slots.
template <int kPerThread, typename StoreEarly>
__device__ void fetch(const RecallParams& p, std::int32_t now, const OwnEntries<kPerThread>& own,
                      const CopyQueue& queue, const Missing& missing, const StoreEarly& store_early,
                      RecallShared& shared, Entry (&entries)[kPerThread], const KernelErrorView& errors) {
  if (missing.rows > 0) {
    meet(kSlotsFound, kThreads);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (entries[i].slot <= kFirstListed) {
        entries[i].slot = shared.look_up.slots[kFirstListed - entries[i].slot];
        p.slots[own.first + i * kWarp] = entries[i].slot;
      }
    }
    store_early();
  }
  copy_others(p.layer, shared, missing, queue);
  wait_for_others(p, now, own, entries, errors);
}

/// Warps that look entries up, and copy what is missing.
template <int kPerThread, bool kForecasts>
__device__ void look_up_and_copy(const RecallParams& p, const CopyQueue& queue, std::int32_t lanes,
                                 RecallShared& shared, const KernelErrorView& errors) {
  const OwnEntries<kPerThread> own(p, static_cast<std::int64_t>(queue.place) * kLookWarps + warp_index(), lanes);
  bring_table<kLookWarps>(p, queue.place, kPerThread * lanes, shared.table);
  if (threadIdx.x == 0) {
    shared.copy = {};
  }
  meet(kLookBarrier, kLookers);
  wait_for_kernel_before();
  let_next_kernel_begin();  // not before: attention's queries would be in the way of select
  const std::int32_t now = tick_of(p);
  Entry entries[kPerThread];
  read_selection(p, shared.table, own, entries, errors);
  const SlotsSeen<kPerThread> seen = look_at_slots(p.layer, now, entries);
  if (kShortWay<kPerThread> && !seen.any_missing()) [[likely]] {
    const auto none = [](int) { return false; };
    const Missing missing = settle<kForecasts>(p, now, own, seen, none, shared, entries);
    announce(kListed, kThreads);
    if (missing.rows > 0) [[unlikely]] {
      return fetch(p, now, own, queue, missing, [] {}, shared, entries, errors);
    }
    if (threadIdx.x == 0) {
      queue.leave();
    }
    return wait_for_others(p, now, own, entries, errors);
  }

  EarlyShared& early_rows = shared.early[warp_index()];
  const EntryMasks early = settled(choose_early(p.layer, entries, seen, queue, kLookWarps, lanes, early_rows), seen);
  const RowList list{early_rows.rows, early_rows.slots, early.count()};
  RowGroup group(p.layer, list, 0, list.count);
  group.load(0);
  const auto is_early = [&](int i) { return early.has(i); };
  const Missing missing = settle<kForecasts>(p, now, own, seen, is_early, shared, entries);
  announce(kListed, kThreads);
  const auto store_early = [&] {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (early.has(i)) {
        early_rows.slots[early.place(i)] = entries[i].slot;
      }
    }
    __syncwarp();
    if (list.count > 0) {
      group.store(0);
      group.copy(RowGroup::kRound);
    }
  };
  fetch(p, now, own, queue, missing, store_early, shared, entries, errors);
}

/// The other warps: they find slots, then help to copy.
template <bool kForecasts>
__device__ void find_slots(const RecallParams& p, const CopyQueue& queue, RecallShared& shared) {
  const std::int32_t claimer = static_cast<std::int32_t>(threadIdx.x) - kLookers;
  LayerCounters& counters = *p.layer.counters;
  if (claimer == kClaimers - 1) {  // what is counted at the end, when nothing should have to be waited for
    ptx::prefetch(&counters.hits);
    ptx::prefetch(&counters.evictions);
  }
  prefetch_maps(p, queue.place * kClaimers + claimer, queue.blocks * kClaimers);
  const std::int32_t now = tick_of(p);
  const RowScores scores = row_scores(p);
  const ClaimPlace place =
      claim_place(p.layer, now, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x));
  const FirstLook look = look_first(p.layer, scores, now, place, claimer, /*expected=*/false);
  wait_for_kernel_before();
  Sight sight = look_ahead(look, scores, now, claimer, shared.claim);
  if (look.stack.free > 0) {
    expect_to_pop(p.layer, look.stack, now, claimer);
  }
  join(kListed, kThreads);
  const Missing missing = shared.look_up.missing();
  if (claimer == kClaimers - 1) {
    const LookUpCounts counts = shared.look_up.counts();
    count(&counters.hits, counts.found - missing.rows);
    count(&counters.lost_races, counts.lost);
    count(&counters.prefetched_used, counts.prefetched<kForecasts>());
    if constexpr (kForecasts) {
      count(&counters.forecast_used, counts.forecast());
    }
    if (missing.rows > 0 || counts.prefetched<kForecasts>() > 0) {
      AtomicWord(p.layer.replacement->missed).store(now, cuda::memory_order_relaxed);
    }
    if (queue.place == 0) {  // for the next score, all of whose thread blocks have to see the same
      p.layer.replacement->expected = p.layer.replacement->asked;
    }
  }
  if (missing.rows == 0) {
    return;
  }
  const std::int32_t* rows = shared.look_up.rows;
  std::int32_t* slots = shared.look_up.slots;
  const std::int32_t evicted =
      claim_slots(p.layer, scores, now, place, claimer, sight, rows, slots, missing.rows, shared.claim);
  meet(kSlotsFound, kThreads);
  publish_slots(p.layer, now, claimer, rows, slots, shared.claim.given);
  if (claimer == 0) {
    count(&counters.misses, shared.claim.given);
    count(&counters.evictions, evicted);
  }
  if (evicted > 0) {
    leave_hint(p.layer, scores, now, claimer, queue.place, sight, rows, slots, shared.claim.given, shared.claim);
  }
  copy_others(p.layer, shared, missing, queue);
}

/// The first blocks append, `row_parts` warps for a row; `lanes` of each warp of the others have entries, kPerThread
/// each. Without kForecasts no row was forecast, and nobody asks whether it was.
template <int kPerThread, bool kForecasts>
__global__ __launch_bounds__(kThreads, kBlocksPerSm) void recall(RecallParams p, std::int32_t append_blocks,
                                                                 std::int32_t row_parts, std::int32_t lanes,
                                                                 KernelErrorView errors) {
  __shared__ RecallShared shared;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  if (block < append_blocks) {
    const AppendParams append{.layer = p.layer,
                              .step = p.step,
                              .shape = p.shape,
                              .kv = p.kv,
                              .kv_dtype = p.kv_dtype,
                              .index_key = nullptr,
                              .index_key_dtype = DType::f32};
    // Rows of a block are append_blocks apart.
    const std::int32_t row = warp_index() / row_parts * append_blocks + block;
    append_row(append, row, {.index = warp_index() % row_parts, .count = row_parts}, errors);
    wait_for_kernel_before();
    return;
  }
  const CopyQueue queue{.left = &p.layer.replacement->copied,
                        .place = block - append_blocks,
                        .blocks = static_cast<std::int32_t>(gridDim.x) - append_blocks};
  if (threadIdx.x < kLookers) {
    look_up_and_copy<kPerThread, kForecasts>(p, queue, lanes, shared, errors);
  } else {
    find_slots<kForecasts>(p, queue, shared);
  }
}

template <int kPerThread, bool kForecasts>
void launch_with(const RecallParams& params, std::int32_t lanes, const LaunchContext& context) {
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  std::int32_t row_parts = kMostRowParts;
  while (row_parts > 1 && params.step.rows > kFullAppendBlocks * kAllWarps / row_parts) {
    row_parts /= 2;
  }
  const unsigned look_up_blocks = blocks_for(entries, kPerThread * kLookWarps * lanes);
  unsigned append_blocks = 0;
  if (params.kv != nullptr) {
    // A block for each row, where multiprocessors have no look-up: writes to the host hold up what else one does.
    const auto multiprocessors = static_cast<unsigned>(context.multiprocessors);
    const unsigned idle = multiprocessors - std::min(look_up_blocks, multiprocessors);
    append_blocks = std::max(blocks_for(static_cast<std::int64_t>(params.step.rows) * row_parts, kAllWarps),
                             std::min(idle, static_cast<unsigned>(params.step.rows)));
  }
  launch_early(context, recall<kPerThread, kForecasts>, append_blocks + look_up_blocks, kThreads, 0, params,
               static_cast<std::int32_t>(append_blocks), row_parts, lanes, context.errors);
}

template <int kPerThread>
void launch_sized(const RecallParams& params, std::int32_t lanes, bool forecasts, const LaunchContext& context) {
  if (forecasts) {
    launch_with<kPerThread, true>(params, lanes, context);
  } else {
    launch_with<kPerThread, false>(params, lanes, context);
  }
}

}  // namespace

void launch_recall(const RecallParams& params, bool forecasts, const LaunchContext& context) {
  // As few entries per warp as still lets all blocks run together, but some; two blocks on a multiprocessor only where
  // the alternative is more than one entry per thread.
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  std::int64_t each = (entries - 1) / (context.multiprocessors * kLookWarps) + 1;
  if (each <= kWarp) {
    std::int32_t lanes = kLeastLanes;
    while (lanes < each) {
      lanes *= 2;
    }
    return launch_sized<1>(params, lanes, forecasts, context);
  }
  each = (each - 1) / kBlocksPerSm + 1;
  if (each <= kWarp) {
    launch_sized<1>(params, kWarp, forecasts, context);
  } else if (each <= 2 * kWarp) {
    launch_sized<2>(params, kWarp, forecasts, context);
  } else if (each <= 4 * kWarp) {
    launch_sized<4>(params, kWarp, forecasts, context);
  } else {
    launch_sized<kMostPerThread>(params, kWarp, forecasts, context);
  }
}

}  // namespace echo
