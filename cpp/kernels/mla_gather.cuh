#pragma once
// Rows of a selection into a tile, by two warpgroups whose warps work for themselves: slots are read a tile ahead, rows
// are loaded a half ahead, while there is no place for them yet (mla_rows.cuh). Lines of the next half's rows are asked
// for before a half is stored.

#include <cstddef>
#include <cstdint>

#include "kernels/kernel_errors.hpp"
#include "kernels/mla_rows.cuh"
#include "kernels/mla_tile.cuh"
#include "kernels/mla_work.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"

namespace echo::mla {

__device__ const std::int32_t kNoSlot = kNone;

/// Starts to load the lane's slot of a tile: kNone where it does not exist.
__device__ __forceinline__ std::int32_t request_slot(const std::int32_t* slots, const Place& place) {
  const std::uint32_t lane = gatherer() % kWarpSlots;
  const std::uint32_t entry = lane / kWarpEntries * kHalf + gatherer() / kWarp * kWarpEntries + lane % kWarpEntries;
  return ptx::load_word(static_cast<std::int32_t>(entry) < place.count ? slots + place.first + entry : &kNoSlot);
}

/// Shows the consumers what the warp has of a half, which has been stored. The fence that the tensor cores need is
/// theirs.
__device__ __forceinline__ void show_half(std::uint32_t half, std::int32_t slots, Shared& shared) {
  const std::uint32_t there = __ballot_sync(kAllLanes, slots != kNone) >> (half * kWarpEntries);
  __syncwarp();
  if (ptx::elect()) {
    reinterpret_cast<std::uint8_t*>(&shared.entries[half])[gatherer() / kWarp] = static_cast<std::uint8_t>(there);
    shared.full[half].arrive();
  }
}

/// The lane's slot of a tile, if it is one; tells the other warps which entries of the tile have rows.
__device__ __forceinline__ std::int32_t checked(std::int32_t slot, std::uint32_t tile, const AttendParams& p,
                                                Shared& shared, const KernelErrorView& errors) {
  if (slot != kNone && (slot < 0 || slot >= p.layer.slots)) {
    errors.raise(KernelError::bad_slot);
    slot = kNone;
  }
  const std::uint32_t there = __ballot_sync(kAllLanes, slot != kNone);
  if (lane_index() < kHalves) {
    reinterpret_cast<std::uint8_t*>(&shared.coming[tile % kComing][lane_index()])[gatherer() / kWarp] =
        static_cast<std::uint8_t>(there >> lane_index() * static_cast<int>(kWarpEntries));
  }
  return slot;
}

/// The gathering warpgroups.
template <RowFormat kFormat>
__device__ __forceinline__ void gather(const AttendParams& p, const Work& work, const Split& split,
                                       const Stretch& stretch, Shared& shared, const KernelErrorView& errors) {
  Gather<kFormat> rows(p.layer.pool);
  Place place(p, work, split, stretch, stretch.first_item());  // of which slots are requested
  std::int32_t slots = kNone;
  std::int32_t coming = request_slot(p.slots, place);
  const bool nan = kFormat == RowFormat::fp8_656 && may_have_nan(p.layer);
  const std::uint32_t halves = kHalves * static_cast<std::uint32_t>(__shfl_sync(kAllLanes, stretch.length, 0));
  // A turn stores a half, but the first one, and starts the loads of the next. All is once in the code, which has to be
  // fetched as it is run.
#pragma unroll 1
  for (std::uint32_t turn = 0;; ++turn) {
    const std::uint32_t half = (turn & 1U) ^ 1U;  // that is stored
    const std::uint32_t tile = (turn - 1) / 2;    // of that half
    const bool first = turn == 0;
    if (half == 0 || first) {  // before others can come to that tile: they wait for this half
      coming = checked(coming, (turn + 1) / 2, p, shared, errors);
    }
    const std::int32_t next = half == 0 ? slots : coming;
    prefetch_rows<kFormat>(p.layer.pool, next, half ^ 1U);
    if (!first) {
      const bool usual = rows.usual(nan);
      shared.empty[half].wait(~tile & 1U);
      if (turn == 1) {  // what the warps told of the first tile; later, full and empty do
        meet_aligned(kGatherBarrier, kGatherers);
      }
      if (shared.coming[tile % kComing][half] != 0) {
        rows.store(usual, ptx::shared_address(shared.rows[half]), slots, half);
        rows.finish();
      }
      show_half(half, slots, shared);
    }
    if (turn == halves) {
      break;
    }
    rows.start(next, half ^ 1U);
    slots = next;
    if (half == 1) {
      place.advance(p, work, split, stretch);
      coming = request_slot(p.slots, place);
    }
  }
}

}  // namespace echo::mla
