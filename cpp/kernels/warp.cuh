#pragma once
// Sums and maxima over a warp or a block, in an order that does not depend on timing; barriers of a part of a block.

#include <cstdint>

namespace echo {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / kWarp); }

__device__ inline std::int32_t warp_sum(std::int32_t value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

/// Maximum of values that are not NaN.
__device__ inline float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

/// Sum of the values of the lanes up to this one.
template <typename T>
__device__ inline T inclusive_warp_sum(T value) {
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, step);
    value += lane_index() >= step ? before : T{0};
  }
  return value;
}

/// Barrier of the hardware for `threads` threads of the block, whole warps; they see what the others wrote before. 0 is
/// the one of __syncthreads.
__device__ inline void meet(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Likewise; whether `value` is true for any of them.
__device__ inline bool meet_or(int barrier, int threads, bool value) {
  int any = 0;
  asm volatile(
      "{ .reg .pred in, out; setp.ne.s32 in, %3, 0; barrier.red.or.pred out, %1, %2, in; selp.s32 %0, 1, 0, out; }"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(value ? 1 : 0)
      : "memory");
  return any != 0;
}

/// In two roles: those that announce go on, those that join wait for all.
__device__ inline void announce(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void join(int barrier, int threads) { meet(barrier, threads); }

/// The same where all lanes of a warp are sure to come together, which spares instructions.
__device__ inline void meet_aligned(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void announce_aligned(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void join_aligned(int barrier, int threads) { meet_aligned(barrier, threads); }

/// Sum of the values of the threads before this one; `total` becomes the sum over all. Called by
/// all threads of a block of kThreads; `sums` is shared memory for kThreads / 32 numbers, free
/// again after the call.
template <int kThreads>
__device__ inline std::int32_t exclusive_sum(std::int32_t value, std::int32_t& total, std::int32_t* sums) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kWarps <= kWarp);
  const std::int32_t inclusive = inclusive_warp_sum(value);
  if (lane_index() == kWarp - 1) {
    sums[warp_index()] = inclusive;
  }
  __syncthreads();
  // Every warp adds up the warps' sums for itself: one barrier less than with one warp doing it for
  // all.
  const std::int32_t up_to = inclusive_warp_sum(lane_index() < kWarps ? sums[lane_index()] : 0);
  total = __shfl_sync(kAllLanes, up_to, kWarps - 1);
  const std::int32_t earlier = __shfl_sync(kAllLanes, up_to, warp_index() == 0 ? 0 : warp_index() - 1);
  __syncthreads();
  return inclusive - value + (warp_index() == 0 ? 0 : earlier);
}

}  // namespace echo
