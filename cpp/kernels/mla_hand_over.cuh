#pragma once
// An item that two clusters do one after the other: the first leaves its running sums in device memory (132 KB a block,
// in practice the second-level cache), as they are, and the second goes on from there. So the outputs have the bits
// that one cluster alone would get.
//
// Each warp leaves its own part and tells the same warp of the other block, without a barrier. Nobody waits for
// somebody who has not begun: clusters are numbered in the order in which they begin (Handing::number_cluster), take
// over from the number before, and do what they hand over first of all, waiting for nothing. So it does not matter how
// many run at once, or what else holds multiprocessors. What readers and the last to begin leave is what the next
// launch needs. Cost on an H200, about half of a tile each: 4,600 cycles to leave the sums, 4,500 to take them.

#include <cstddef>
#include <cstdint>

#include "kernels/mla_heads.cuh"
#include "kernels/mla_work.cuh"
#include "kernels/ptx/cluster.cuh"

namespace echo::mla {

/// What a block leaves; zero before the first launch.
struct RunningSums {
  uint4 out[kOutputs / 4][kConsumers];
  uint4 heads[kConsumers];  ///< references and sums
  std::uint32_t told[kConsumers / kWarp];
};

inline constexpr std::size_t kHandingHead = 256;  ///< bytes before what blocks leave

/// The memory through which the clusters of a launch hand over.
struct Handing {
  std::uint32_t* begun;  ///< clusters that have begun, in a launch with items that are cut
  RunningSums* blocks;   ///< [clusters, splits]

  /// Finds out the cluster's stretch, and ends with a barrier of the block. All threads of the cluster call it.
  __device__ __forceinline__ void number_cluster(const Work& work, std::uint32_t rank, Shared& shared) const {
    if (work.deal.cut()) {
      if (threadIdx.x == 0 && rank == 0) {
        // Behind the last it is 0 again.
        shared.number = static_cast<std::int32_t>(atomicInc(begun, static_cast<unsigned>(work.deal.clusters - 1)));
      }
      ptx::cluster_sync();
    }
    if (threadIdx.x == 0) {
      shared.stretch = work.deal.stretch(work.deal.cut() ? *ptx::of_block(&shared.number, 0)
                                                         : static_cast<std::int32_t>(ptx::cluster_index()));
    }
    __syncthreads();
  }
  __device__ __forceinline__ RunningSums& sums(const AttendParams& p, std::int32_t number, std::uint32_t rank) const {
    return blocks[number * p.splits + static_cast<std::int32_t>(rank)];
  }
};

/// A consuming warp's part of the sums to where take_over finds it once it has been told.
__device__ __forceinline__ void hand_over(const Attention& attention, RunningSums& sums) {
  const std::uint32_t thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < kOutputs; i += 4) {
    ptx::store(&sums.out[i / 4][thread], make_uint4(bits_of(attention.out[i]), bits_of(attention.out[i + 1]),
                                                    bits_of(attention.out[i + 2]), bits_of(attention.out[i + 3])));
  }
  ptx::store(&sums.heads[thread], make_uint4(bits_of(attention.reference[0]), bits_of(attention.reference[1]),
                                             bits_of(attention.sum[0]), bits_of(attention.sum[1])));
}

/// Waits until they are there, so it comes when they may be.
__device__ __forceinline__ void tell(RunningSums& sums) {
  __syncwarp();
  if (lane_index() == 0) {
    ptx::store_release(&sums.told[threadIdx.x / kWarp], 1U);
  }
}

/// Waits for it.
__device__ __forceinline__ void take_over(RunningSums& sums, Attention& attention) {
  const std::uint32_t thread = threadIdx.x;
  if (lane_index() == 0) {
    while (ptx::load_acquire(&sums.told[thread / kWarp]) == 0U) {
    }
    sums.told[thread / kWarp] = 0U;  // for the next launch
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOutputs; i += 4) {
    const uint4 four = ptx::load(&sums.out[i / 4][thread]);
    attention.out[i] = float_of(four.x);
    attention.out[i + 1] = float_of(four.y);
    attention.out[i + 2] = float_of(four.z);
    attention.out[i + 3] = float_of(four.w);
  }
  const uint4 heads = ptx::load(&sums.heads[thread]);
  attention.reference[0] = float_of(heads.x);
  attention.reference[1] = float_of(heads.y);
  attention.sum[0] = float_of(heads.z);
  attention.sum[1] = float_of(heads.w);
}

}  // namespace echo::mla
