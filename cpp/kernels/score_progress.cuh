#pragma once
// How far the multiplying warps of a thread block have come, for warps that read their scores. Multipliers only store a
// word each, so nobody can hold them up.

#include <cstdint>

#include "kernels/warp.cuh"

namespace echo {

inline constexpr int kGroupWarps = 4;   ///< of a warpgroup
inline constexpr int kMultipliers = 3;  ///< warpgroups, which take the key blocks of a share in turns
inline constexpr int kMultiplierWarps = kMultipliers * kGroupWarps;
inline constexpr int kLoaderWarps = 3;  ///< that load queries, and sift

/// What was loaded before is older than what is loaded behind it, for all of the thread block.
__device__ inline void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

/// In shared memory.
struct ScoreProgress {
  std::int32_t finished[kMultiplierWarps];  ///< key blocks, by each warp

  /// By a warp, behind its stores.
  __device__ void publish(int warp, std::int32_t count) {
    __syncwarp();
    if (lane_index() == 0) {
      asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(address(finished + warp)), "r"(count) : "memory");
    }
  }

  /// Key blocks, from the first of the share on, whose scores can be read. By all lanes.
  __device__ std::int32_t available() const {
    constexpr std::int32_t kMost = 0x7FFFFFFF;
    std::int32_t next = kMost;  // that is not finished
    if (lane_index() < kMultiplierWarps) {
      std::int32_t count = 0;
      asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(count) : "r"(address(finished + lane_index())) : "memory");
      next = count * kMultipliers + lane_index() / kGroupWarps;
    }
    next = __reduce_min_sync(kAllLanes, next);
    fence_block();
    return next;
  }

 private:
  __device__ static std::uint32_t address(const std::int32_t* word) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(word));
  }
};

}  // namespace echo
