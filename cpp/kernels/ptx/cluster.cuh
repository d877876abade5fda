#pragma once
// What blocks of a cluster share: its barrier, which also makes their writes visible, and each other's shared memory.

#include <cstdint>

namespace echo::ptx {

/// Blocks of this block's cluster.
__device__ __forceinline__ std::uint32_t cluster_size() {
  std::uint32_t size = 0;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

/// The two halves of the barrier of all threads of the cluster that have not ended: what a thread did before it arrived
/// is visible to all that have waited.
__device__ __forceinline__ void cluster_release() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_acquire() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ void cluster_sync() {
  cluster_release();
  cluster_acquire();
}

/// The same variable of this block's shared memory in that of block `rank`.
template <typename T>
__device__ __forceinline__ T* of_block(T* shared, std::uint32_t rank) {
  std::uint64_t remote = 0;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(reinterpret_cast<std::uint64_t>(shared)), "r"(rank));
  return reinterpret_cast<T*>(remote);
}

}  // namespace echo::ptx
