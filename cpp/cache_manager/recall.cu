// recall: makes the selected rows resident and says in which slots they are. One launch, many blocks, no barrier
// between them: residency.cuh says what keeps them from each other's slots.
//
// A block takes consecutive entries of the selection, so that its misses are in order of address (positions ascend):
// reads of neighbouring rows share address translations, which is what host reads cost. It
//   looks up      three dependent loads per entry (selection, block table, slot_of) and one atomic maximum; warps that
//                 have no entries look at slots that might be given away,
//   lists misses  in order, in shared memory,
//   starts rows   each warp loads its first rows from host memory into registers,
//   claims slots  while those are on their way,
//   copies        the loaded rows, then the rest, warps side by side in the list. Not too many rows at once: some
//   thousand
//                 open translations are slower than one thousand,
//   waits         for rows that other blocks fetch, and writes the slots of its entries.
// The first blocks append the new rows of the pass, if kv is given (append_rows.cuh). Entries that select those wait
// for them; all blocks of a decode step are on the GPU together, and the first ones start first.
// Cost on an H200: 4-5 us for 26K hits; misses cost what the link takes, 30-35 fresh rows per us, from 4 us on.
#include <algorithm>

#include "cache_manager/recall.cuh"
#include "kernels/append_rows.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = kAppendThreads;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostLookers = 448;  ///< threads that look entries up; the others look at slots meanwhile
constexpr int kMostPerThread = 4;
constexpr int kMostEntries = kMostPerThread * kMostLookers;  ///< of a block
constexpr int kPieces = 4;                                   ///< 16-byte pieces that a lane has under way
constexpr std::int32_t kRowsAtOnce = 1024;                   ///< under way in the whole grid, about

struct RecallShared {
  std::int32_t rows[kMostEntries];   ///< missing rows, in the order of their entries
  std::int32_t slots[kMostEntries];  ///< and the slots that they get
  std::int32_t entries;
  std::int32_t lost;
  std::int32_t warp_sums[kWarps];
  ClaimShared claim;
};

/// What recall knows of an entry of the selection.
struct Entry {
  std::int32_t row = kNone;  ///< host row, kNone where there is nothing to recall
  std::int32_t slot =
      kNone;  ///< kNone: to be fetched; then kListed - place in the list; kPending: another thread does it
};
constexpr std::int32_t kListed = -16;

/// Rows of the list that go through one warp together: their pieces, from `first` on, in registers.
class RowGroup {
 public:
  __device__ RowGroup(const LayerView& layer, const RecallShared& shared, std::int32_t first, std::int32_t rows)
      : layer_(layer), shared_(shared), first_(first), pieces_(layer.row_bytes / kPieceBytes), total_(rows * pieces_) {}

  /// Pieces of the whole group; a round moves kPieces * kWarp of them.
  __device__ std::int32_t total() const { return total_; }

  __device__ void load(std::int32_t round) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const std::int32_t piece = round + i * kWarp + lane_index();
      if (piece < total_) {
        const std::byte* row = row_address(layer_.slab, shared_.rows[first_ + piece / pieces_], layer_.host_stride);
        loaded_[i] = __ldcs(reinterpret_cast<const uint4*>(row) + piece % pieces_);
      }
    }
  }

  /// Once their slots are known. Rows that got none are dropped.
  __device__ void store(std::int32_t round) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const std::int32_t piece = round + i * kWarp + lane_index();
      if (piece < total_) {
        const std::int32_t slot = shared_.slots[first_ + piece / pieces_];
        if (slot >= 0) {
          reinterpret_cast<uint4*>(row_address(layer_.pool, slot, layer_.row_bytes))[piece % pieces_] = loaded_[i];
        }
      }
    }
  }

  static constexpr std::int32_t kPieceBytes = 16;
  static constexpr std::int32_t kRound = kPieces * kWarp;

 private:
  const LayerView& layer_;
  const RecallShared& shared_;
  std::int32_t first_;
  std::int32_t pieces_;
  std::int32_t total_;
  uint4 loaded_[kPieces];
};

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

__device__ void count(std::int64_t* counter, std::int32_t number) {
  if (number != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(number));
  }
}

/// Slots for the list of missing rows, and their bytes. Returns how many rows were evicted.
__device__ std::int32_t fetch(const RecallParams& p, const ClaimPlace& place, const Sight& sight, std::int32_t ahead,
                              std::int32_t missing, std::int32_t now, RecallShared& shared) {
  const std::int32_t pieces = p.layer.row_bytes / RowGroup::kPieceBytes;
  std::int32_t rows = max(1, min(kRowsAtOnce / kWarps / static_cast<std::int32_t>(gridDim.x), missing / kWarps));
  while (rows > 1 && rows * pieces > RowGroup::kRound) {
    --rows;
  }
  const std::int32_t start = warp_index() * rows;
  RowGroup group(p.layer, shared, start, max(0, min(rows, missing - start)));
  group.load(0);
  const std::int32_t evicted =
      claim_slots(p.layer, row_scores(p), now, place, sight, ahead, shared.rows, shared.slots, missing, shared.claim);
  __syncthreads();
  publish_slots(p.layer, now, shared.rows, shared.slots, shared.claim.given);
  group.store(0);
  for (std::int32_t round = RowGroup::kRound; round < group.total(); round += RowGroup::kRound) {
    group.load(round);
    group.store(round);
  }
  for (std::int32_t first = start + kWarps * rows; first < missing; first += kWarps * rows) {
    RowGroup next(p.layer, shared, first, min(rows, missing - first));
    for (std::int32_t round = 0; round < next.total(); round += RowGroup::kRound) {
      next.load(round);
      next.store(round);
    }
  }
  return evicted;
}

/// Looks up the host rows of a thread's entries. Each kind of access goes out for all of them before the first is
/// waited for; what is not simply resident is settled one by one. Returns how many others are fetching already.
template <int kPerThread>
__device__ std::int32_t look_up_all(const LayerView& layer, std::int32_t now, Entry (&entries)[kPerThread]) {
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
    } else if (entry.row != kNone && entry.slot != kPending) {
      entry.slot = look_up(layer, entry.row, now, slots[i]);
      lost += entry.slot == kPending ? 1 : 0;
    }
  }
  return lost;
}

template <int kPerThread>
__device__ void recall_entries(const RecallParams& p, std::int32_t block, std::int32_t blocks, std::int32_t per_block,
                               RecallShared& shared, const KernelErrorView& errors) {
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t lookers = min(per_block, kMostLookers);
  const std::int64_t first = static_cast<std::int64_t>(block) * per_block;
  const std::int64_t end = min(first + per_block, static_cast<std::int64_t>(p.block.count) * p.shape.top_k);
  const ClaimPlace place = claim_place(p.layer, now, block, blocks);
  const std::int32_t ahead = min(kThreads - lookers, place.window);
  const auto entry_of = [&](int i) { return thread < lookers ? first + thread + i * lookers : end; };

  Entry entries[kPerThread];
  Sight sight;
  std::int32_t lost = 0;
  if (thread < lookers) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      bool is_new = false;
      if (entry_of(i) < end) {
        entries[i].row = selected_row(p, entry_of(i), is_new, errors);
      }
      entries[i].slot = is_new ? kPending : kNone;
    }
    lost = look_up_all(p.layer, now, entries);
  } else if (thread - lookers < ahead) {
    sight = look_at(p.layer, row_scores(p), now, place, thread - lookers);
  }
  if (thread == kThreads - 1) {
    shared.claim.free = AtomicWord(p.layer.replacement->free).load(cuda::memory_order_relaxed);
    shared.entries = 0;
    shared.lost = 0;
  }
  std::int32_t found = 0;
  bool any_missing = false;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const Entry& entry = entries[i];
    found += entry.row != kNone ? 1 : 0;
    any_missing = any_missing || (entry.row != kNone && entry.slot == kNone);
  }
  std::int32_t missing = 0;
  std::int32_t evicted = 0;
  if (__syncthreads_or(any_missing) != 0) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      Entry& entry = entries[i];
      const bool listed = entry.row != kNone && entry.slot == kNone;
      std::int32_t total = 0;
      const std::int32_t place_in_list = missing + exclusive_sum<kThreads>(listed ? 1 : 0, total, shared.warp_sums);
      if (listed) {
        shared.rows[place_in_list] = entry.row;
        entry.slot = kListed - place_in_list;
      }
      missing += total;
    }
    __syncthreads();
    evicted = fetch(p, place, sight, ahead, missing, now, shared);
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
    if (entry_of(i) < end) {
      p.slots[entry_of(i)] = entry.slot;
    }
  }
  if (failed) {
    errors.raise(KernelError::pool_exhausted);
  }
  found = warp_sum(found);
  lost = warp_sum(lost);
  if (lane_index() == 0 && found != 0) {
    atomicAdd(&shared.entries, found);
    atomicAdd(&shared.lost, lost);
  }
  __syncthreads();
  if (thread == 0) {
    count(&p.layer.counters->hits, shared.entries - missing);
    count(&p.layer.counters->misses, missing == 0 ? 0 : shared.claim.given);
    count(&p.layer.counters->evictions, evicted);
    count(&p.layer.counters->lost_races, shared.lost);
  }
}

template <int kPerThread>
__global__ __launch_bounds__(kThreads, kPerThread == 1 ? 2 : 1) void recall(RecallParams p, std::int32_t append_blocks,
                                                                            std::int32_t per_block,
                                                                            KernelErrorView errors) {
  __shared__ union Shared {
    __device__ Shared() {}
    RecallShared recall;
    AppendShared append;
  } shared;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const auto blocks = static_cast<std::int32_t>(gridDim.x);
  if (block < append_blocks) {
    const AppendParams append{.layer = p.layer,
                              .step = p.step,
                              .shape = p.shape,
                              .kv = p.kv,
                              .kv_dtype = p.kv_dtype,
                              .index_key = nullptr,
                              .index_key_dtype = DType::f32,
                              .to_slots = true};
    const std::int32_t now = *p.step.tick + p.block.tick_offset;
    append_rows(append, row_scores(p), now, claim_place(p.layer, now, blocks - 1 - block, blocks), block * kAppendRows,
                shared.append, errors);
    return;
  }
  recall_entries<kPerThread>(p, block - append_blocks, blocks, per_block, shared.recall, errors);
}

}  // namespace

void launch_recall(const RecallParams& params, const LaunchContext& context) {
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  // As few entries per block as one block per multiprocessor allows: many links in flight for a small batch, few
  // blocks that claim slots for a large one.
  constexpr std::int32_t kSizes[] = {128, 256, kMostLookers, 2 * kMostLookers, kMostEntries};
  std::int32_t per_block = kMostEntries;
  for (const std::int32_t size : kSizes) {
    if (blocks_for(entries, size) <= static_cast<unsigned>(context.multiprocessors)) {
      per_block = size;
      break;
    }
  }
  const unsigned append_blocks = params.kv == nullptr ? 0U : blocks_for(params.step.rows, kAppendRows);
  const unsigned blocks = append_blocks + blocks_for(entries, per_block);
  const auto first = static_cast<std::int32_t>(append_blocks);
  if (per_block <= kMostLookers) {
    launch(context, recall<1>, blocks, kThreads, 0, params, first, per_block, context.errors);
  } else if (per_block <= 2 * kMostLookers) {
    launch(context, recall<2>, blocks, kThreads, 0, params, first, per_block, context.errors);
  } else {
    launch(context, recall<kMostPerThread>, blocks, kThreads, 0, params, first, per_block, context.errors);
  }
}

}  // namespace echo
