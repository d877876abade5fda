#pragma once
// An item that two teams do one after the other: the blocks of the first leave their running sums in device memory
// (132 KB each, in practice the L2 cache), as they are, and those of the second go on from there, split by
// split. So the outputs have the bits that one team alone would get.
//
// Each warp leaves its own part and tells the same warp of the other block, without a barrier. Nobody waits for
// somebody who has not begun: blocks take tickets as they begin (attend_sm90.cu), take over from the team before,
// and do what they hand over first of all, waiting for nothing. So it does not matter how many run at once, or what
// else holds multiprocessors. What readers leave is what the next launch needs. Cost on an H200, about half of a tile
// each: 4,600 cycles to leave the sums, 4,500 to take them.

#include <cstdint>

#include "kernels/attend_sm90.hpp"
#include "kernels/mla_heads.cuh"
#include "kernels/mla_work.cuh"

namespace echo::mla {

/// What a block leaves; zero before the first launch.
struct RunningSums {
  uint4 out[kOutputs / 4][kConsumers];
  uint4 heads[kConsumers];  ///< references and sums
  uint4 told[kConsumers / kWarp];
};
static_assert(sizeof(RunningSums) == kAttendRunningBytes);

/// Of a block of a launch.
__device__ __forceinline__ RunningSums& running_sums(const AttendExchange& exchange, std::uint32_t team,
                                                     std::uint32_t splits, std::uint32_t rank) {
  return static_cast<RunningSums*>(exchange.running)[team * splits + rank];
}

/// A consuming warp's part of the sums to where take_over finds it once it has been told.
__device__ __forceinline__ void hand_over(const Attention& attention, RunningSums& sums) {
  const std::uint32_t thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < kOutputs; i += 4) {
    ptx::store(&sums.out[i / 4][thread], attention.out[i], attention.out[i + 1], attention.out[i + 2],
               attention.out[i + 3]);
  }
  ptx::store(&sums.heads[thread], attention.reference[0], attention.reference[1], attention.sum[0], attention.sum[1]);
}

/// Waits until they are there, so it comes when they may be.
__device__ __forceinline__ void tell(RunningSums& sums) {
  __syncwarp();
  if (lane_index() == 0) {
    ptx::store_release(&sums.told[threadIdx.x / kWarp].x, 1U);
  }
}

/// Waits for it, and loads what there is; where an item begins here, `begun` is false, and nothing changes. A branch
/// around the loads instead would cost moves of registers in every tile.
__device__ __forceinline__ void take_over(bool begun, RunningSums& sums, Attention& attention) {
  const std::uint32_t thread = threadIdx.x;
  if (begun && lane_index() == 0) {
    while (ptx::load_acquire(&sums.told[thread / kWarp].x) == 0U) {
    }
    sums.told[thread / kWarp].x = 0U;  // for the next launch
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOutputs; i += 4) {
    ptx::load_if(begun, &sums.out[i / 4][thread], attention.out[i], attention.out[i + 1], attention.out[i + 2],
                 attention.out[i + 3]);
  }
  ptx::load_if(begun, &sums.heads[thread], attention.reference[0], attention.reference[1], attention.sum[0],
               attention.sum[1]);
}

}  // namespace echo::mla
