// begin: what the verbs of a pass find done, for all layers at once.
//
// Slots for the new rows: a block claims them for up to kRowsOfBlock rows in one layer. Nothing is scored yet, so it
// takes those that hints of the step before name (hints.hpp); what these lack, like a block of recall that finds rows
// missing (claim_slots.cuh), but by age. Nobody else looks rows up in this launch.
//
// Owners: which batch entry a host block belongs to, the inverse of the block tables; a thread per block of an entry.
// Nothing is cleared: whoever reads an entry checks it against the block table. Besides, each batch entry's thread
// blocks zero what the first score of the pass sifts into for the entry's rows.
//
// Cost: the claims of 61 layers and 13 sessions add 8 us to a step on an H200; 20K blocks (13 sessions of 100K tokens)
// are 160 KB of scattered 8-byte stores.
#include <algorithm>

#include "cache_manager/begin.cuh"
#include "cache_manager/claim_slots.cuh"
#include "cache_manager/hints.hpp"
#include "kernels/launch.cuh"
#include "kernels/step_rows.cuh"

namespace echo {
namespace {

constexpr int kThreads = kClaimers;
constexpr std::int32_t kRowsOfBlock = 8;
constexpr std::int32_t kHintsOfBlock = 2 * kRowsOfBlock;  ///< that it looks at

/// What the blocks of a launch do: those that claim come first, as they take longest.
struct BeginGrid {
  const LayerView* layers;
  std::int32_t claims;  ///< blocks that claim in a layer
  std::int32_t claim_blocks;
  std::int32_t owner_blocks;  ///< of a batch entry
};

struct ClaimedRows {
  ClaimShared claim;
  std::int32_t missing;
  std::int32_t hinted;  ///< of them have slots that hints named
  std::int32_t rows[kRowsOfBlock];
  std::int32_t slots[kRowsOfBlock];
};

/// What a hint of the block names, for its first threads.
__device__ Sight see_hint(const LayerView& layer, std::int32_t now, std::int32_t block, std::int32_t claimer) {
  const Hints hints(layer);
  Sight sight;
  if (claimer < min(kHintsOfBlock, hints.count)) {
    const Hint hint = hints.read((block * kRowsOfBlock + claimer) % hints.count, layer);
    if (hint.slot >= 0) {
      sight.stamp = stamp_word(layer, hint.slot).load(cuda::memory_order_relaxed);
      sight.row = host_word(layer, hint.slot).load(cuda::memory_order_relaxed);
      sight.slot = hint.holds(sight.stamp, now) && sight.row >= 0 ? hint.slot : kNone;
    }
  }
  return sight;
}

/// Gives what was seen to the first of the missing rows. By a warp.
__device__ void take_hints(const LayerView& layer, const Sight& hint, ClaimedRows& shared) {
  const unsigned below = (1U << lane_index()) - 1U;
  const unsigned seen = __ballot_sync(kAllLanes, hint.slot != kNone);
  const bool taken =
      hint.slot != kNone && __popc(seen & below) < shared.missing && evict(layer, hint.slot, hint.stamp, hint.row);
  const unsigned all = __ballot_sync(kAllLanes, taken);
  if (taken) {
    const std::int32_t mine = __popc(all & below);
    assign(layer, hint.slot, shared.rows[mine]);
    shared.slots[mine] = hint.slot;
  }
  if (lane_index() == 0) {
    shared.hinted = __popc(all);
  }
}

/// Slots for rows [first, first + kRowsOfBlock) of the pass, by block `block` of those that claim in the layer.
__device__ void claim_for_new_rows(const LayerView& layer, const StepView& step, std::int32_t block,
                                   std::int32_t blocks, ClaimedRows& shared, const KernelErrorView& errors) {
  const auto claimer = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t row = block * kRowsOfBlock + claimer;
  if (claimer == 0) {
    shared.missing = shared.hinted = 0;
  }
  __syncthreads();
  const std::int32_t now = *step.tick;
  const ClaimPlace place = claim_place(layer, now, block, blocks);
  const Sight hint = see_hint(layer, now, block, claimer);
  const FirstLook look = look_first(layer, RowScores{}, now, place, claimer, /*expected=*/true);
  Sight sight = look_ahead(look, RowScores{}, now, claimer, shared.claim);
  if (claimer < kRowsOfBlock && row < step.rows) {
    const std::int32_t target = new_host_row(layer, step, row, errors);
    if (target != kNone && look_up(layer, target, new_row_at(now)) == kNone) {
      shared.rows[atomicAdd(&shared.missing, 1)] = target;
    }
  }
  __syncthreads();
  const std::int32_t missing = shared.missing;
  if (missing == 0) {
    return;
  }
  if (claimer < kWarp && shared.claim.free <= 0) {
    take_hints(layer, hint, shared);
  }
  __syncthreads();
  const std::int32_t hinted = shared.hinted;
  std::int32_t evicted = hinted;
  if (hinted < missing) {
    evicted += claim_slots(layer, RowScores{}, now, place, claimer, sight, shared.rows + hinted, shared.slots + hinted,
                           missing - hinted, shared.claim);
    __syncthreads();
  }
  const std::int32_t given = hinted + shared.claim.given;
  publish_slots(layer, new_row_at(now), claimer, shared.rows, shared.slots, given);
  if (claimer == 0) {
    count(&layer.counters->evictions, evicted);
    if (given < missing) {
      errors.raise(KernelError::pool_exhausted);
    }
  }
}

/// Position of the last row of a batch entry that is no padding, kNone if there is none.
__device__ std::int32_t last_position(const StepView& step, std::int32_t entry) {
  std::int32_t position = kNone;
  for (std::int32_t row = step.query_rows; row > 0 && position == kNone; --row) {
    position = step.positions[entry * step.query_rows + row - 1];
  }
  return position;
}

/// By thread `thread` of `threads` of the entry's.
__device__ void clear_sift(const BeginParams& p, std::int32_t entry, std::int32_t thread, std::int32_t threads) {
  if (p.sift_rows != nullptr) {
    static_assert(sizeof(RowSift) == sizeof(uint4));
    auto* rows = reinterpret_cast<uint4*>(p.sift_rows + entry * p.step.query_rows);
    for (std::int32_t i = thread; i < p.step.query_rows; i += threads) {
      rows[i] = make_uint4(0U, 0U, 0U, 0U);
    }
  }
  if (p.prefetched != nullptr && entry == 0 && thread == 0) {
    *p.prefetched = 0;
  }
}

__device__ void note_owners(const BeginParams& p, std::int32_t entry, std::int32_t thread, std::int32_t threads) {
  const std::int32_t last = last_position(p.step, entry);
  const std::int32_t count = last < 0 ? 0 : min(last / kTokensPerBlock + 1, p.step.table_stride);
  const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(entry) * p.step.table_stride;
  for (std::int32_t index = thread; index < count; index += threads) {
    const std::int32_t block = table[index];
    if (block >= 0 && block < p.host_blocks) {
      p.step.owners[block] = {entry, index};
    }
  }
}

__global__ __launch_bounds__(kThreads) void begin_pass(BeginParams p, BeginGrid grid, KernelErrorView errors) {
  __shared__ ClaimedRows shared;
  auto block = static_cast<std::int32_t>(blockIdx.x);
  if (block < grid.claim_blocks) {
    const LayerView layer = grid.layers[block / grid.claims];
    claim_for_new_rows(layer, p.step, block % grid.claims, grid.claims, shared, errors);
    return;
  }
  block -= grid.claim_blocks;
  const std::int32_t entry = block / grid.owner_blocks;
  const std::int32_t thread = block % grid.owner_blocks * kThreads + static_cast<std::int32_t>(threadIdx.x);
  clear_sift(p, entry, thread, grid.owner_blocks * kThreads);
  note_owners(p, entry, thread, grid.owner_blocks * kThreads);
}

}  // namespace

void launch_begin(const BeginParams& params, const LayerView* layers, const LaunchContext& context) {
  constexpr unsigned kMostOwnerBlocks = 8;
  const unsigned claims = blocks_for(params.step.rows, kRowsOfBlock);
  const unsigned claim_blocks = static_cast<unsigned>(params.layers.size()) * claims;
  const unsigned owner_blocks = std::min(kMostOwnerBlocks, blocks_for(params.step.table_stride, kThreads));
  const auto entries = static_cast<unsigned>(params.step.rows / params.step.query_rows);
  const BeginGrid grid{.layers = layers,
                       .claims = static_cast<std::int32_t>(claims),
                       .claim_blocks = static_cast<std::int32_t>(claim_blocks),
                       .owner_blocks = static_cast<std::int32_t>(owner_blocks)};
  launch(context, begin_pass, claim_blocks + entries * owner_blocks, kThreads, 0, params, grid, context.errors);
}

}  // namespace echo
