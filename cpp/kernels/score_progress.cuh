#pragma once
// How far the multiplying warps of a thread block have come, for warps that read their scores. Multipliers only store a
// word each, so nobody can hold them up.

#include <cstdint>

#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/copy.cuh"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr int kGroupWarps = 4;   ///< of a warpgroup
inline constexpr int kMultipliers = 3;  ///< warpgroups, which take the key blocks of a share in turns
inline constexpr int kMultiplierWarps = kMultipliers * kGroupWarps;
inline constexpr int kLoaderWarps = 3;  ///< that load queries, and sift

/// In shared memory.
struct ScoreProgress {
  std::int32_t finished[kMultiplierWarps];  ///< key blocks, by each warp

  /// By a warp, behind its stores.
  __device__ void publish(int warp, std::int32_t count) {
    __syncwarp();
    if (lane_index() == 0) {
      ptx::store_shared_release(ptx::shared_address(finished + warp), count);
    }
  }

  /// Key blocks, from the first of the share on, whose scores can be read. By all lanes.
  __device__ std::int32_t available() const {
    constexpr std::int32_t kMost = 0x7FFFFFFF;
    std::int32_t next = kMost;  // that is not finished
    if (lane_index() < kMultiplierWarps) {
      const std::int32_t count = ptx::load_shared_volatile(ptx::shared_address(finished + lane_index()));
      next = count * kMultipliers + lane_index() / kGroupWarps;
    }
    next = __reduce_min_sync(kAllLanes, next);
    ptx::block_fence();
    return next;
  }
};

}  // namespace echo
