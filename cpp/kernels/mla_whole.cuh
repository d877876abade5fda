#pragma once
// FP8 rows of selections that are one split, 32 halves in a row. Gathering warps have no pause there, so that what one
// of them waits for makes every half take longer:
//   - a row of the next half is loaded as soon as its registers are free, behind the stores that free them;
//   - rope parts are copied, and arrive at the half's barrier by themselves;
//   - slots are asked for before a half is stored, so that they are there behind it. Until then nothing is done with
//     them: a copy to another register would be a wait, for all that the warp has under way.
// Cost of a half, for a warp on an H200: 2,600 cycles to store it, as stores wait while the logits' operands fill
// shared memory, and 1,000 for the rest. A call takes less with 32 halves, more with few.

#include <cstddef>
#include <cstdint>

#include "kernels/kernel_errors.hpp"
#include "kernels/mla_gather.cuh"
#include "kernels/mla_rows.cuh"
#include "kernels/mla_tile.cuh"
#include "kernels/mla_work.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"

namespace echo::mla {

/// A half's rows, on their way.
class WholeRows : public Fp8Rows {
 public:
  __device__ __forceinline__ explicit WholeRows(const std::byte* pool) : Fp8Rows(pool) {}

  /// Starts the loads of a half of the tile whose slots the lanes have.
  __device__ __forceinline__ void start(std::int32_t slots, std::uint32_t half) {
    const std::int32_t own = own_slot(slots, half);
    start_scales(own);
    const Latents latents(pool_, own);
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      codes_[i] = latents.load(i);
    }
  }

  /// Stores that half, its first row in the first atom at `to`; its rope parts arrive at `full`, for each thread.
  /// Starts the loads of the next half, whose slots are in `next`: of each row as soon as its registers are free.
  __device__ __forceinline__ void store(bool usual, std::uint32_t to, std::int32_t slots, std::uint32_t half,
                                        std::int32_t next, ptx::Mbarrier& full) {
    copy_rope(own_slot(slots, half), to);
    full.arrive_with_copies();
    const Unpacking unpacking(scales_, to);
    const std::int32_t coming = own_slot(next, half ^ 1U);
    start_scales(coming);
    const Latents latents(pool_, coming);
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      unpacking.store(i, codes_[i]);
      codes_[i] = latents.load(i);
      if (i + 1 < kWarpEntries) {
        __syncwarp();  // else the compiler gathers loads and addresses, for which there are no registers
      }
    }
    if (!usual) {
      __syncwarp();  // the right values come last
      store_exactly(pool_, slots, half, to);
    }
  }

 private:
  /// Latents of a warp's entries; where there is no row those of the pool's first, to be taken times a scale of 0.
  class Latents {
   public:
    /// `own`: slot of the lane's entry.
    __device__ __forceinline__ Latents(const std::byte* pool, std::int32_t own)
        : base_(pool + gatherer() % kWarp * 16), rows_(max(own, 0)) {
      asm volatile("" : "+l"(base_));  // else it is added up anew for each row
    }
    /// Starts to load the lane's of an entry.
    __device__ __forceinline__ uint4 load(std::uint32_t entry) const {
      return ptx::load(row_address(base_, slot_of(rows_, 0, entry), kFp8RowBytes));
    }

   private:
    const std::byte* base_;
    std::int32_t rows_;
  };

  __device__ __forceinline__ void copy_rope(std::int32_t own, std::uint32_t to) const {
    const std::uint32_t lane = gatherer() % kWarp;
    const std::uint32_t first = first_rope_place(to);
#pragma unroll
    for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
      const std::int32_t slot = slot_of(own, 0, 4 * i + lane / 8);
      const std::byte* from = row_address(pool_ + kFp8Scales + 16 + lane % 8 * 16, max(slot, 0), kFp8RowBytes);
      ptx::copy_async(rope_place(first, i), from, slot != kNone);
    }
  }
};

/// The gathering warpgroups.
__device__ __forceinline__ void gather_whole(const AttendParams& p, const Work& work, const Split& split,
                                             const Stretch& stretch, Shared& shared, const KernelErrorView& errors) {
  WholeRows rows(p.layer.pool);
  Place place(p, work, split, stretch, stretch.first_item());  // of which slots are requested
  std::int32_t requested = request_slot(p.slots, place);
  const bool nan = may_have_nan(p.layer);
  const std::uint32_t halves = kHalves * static_cast<std::uint32_t>(__shfl_sync(kAllLanes, stretch.length, 0));
  std::int32_t slots = checked(requested, 0, p, shared, errors);
  std::int32_t coming = kNone;
  rows.start(slots, 0);
  place.advance(p, work, split, stretch);
  requested = request_slot(p.slots, place);
  meet_aligned(kGatherBarrier, kGatherers);  // what the warps told of the first tile; later, full and empty do
#pragma unroll 1
  for (std::uint32_t turn = 1;; ++turn) {
    const std::uint32_t half = (turn & 1U) ^ 1U;  // that is stored
    const std::uint32_t tile = (turn - 1) / 2;    // of that half
    const std::int32_t next = half == 0 ? slots : coming;
    const bool usual = rows.usual(nan);
    if (half == 0) {  // before others can come to that tile: they wait for this half
      coming = checked(requested, tile + 1, p, shared, errors);
    } else {
      place.advance(p, work, split, stretch);
      requested = request_slot(p.slots, place);
    }
    shared.empty[half].wait(~tile & 1U);
    if (shared.coming[tile % kComing][half] != 0) {
      rows.store(usual, ptx::shared_address(shared.rows[half]), slots, half, next, shared.full[half]);
    } else {
      shared.full[half].arrive();  // for copies that are none
      rows.start(next, half ^ 1U);
    }
    show_half(half, slots, shared);
    if (turn == halves) {
      break;
    }
    slots = next;
  }
}

}  // namespace echo::mla
