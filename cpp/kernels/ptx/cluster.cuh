#pragma once
// What blocks of a cluster share: its barrier, which can also make their writes visible, and each other's shared
// memory, written by stores whose arrival a barrier there counts.

#include <cstdint>

#include "kernels/ptx/barrier.cuh"

namespace echo::ptx {

/// Blocks of this block's cluster.
__device__ __forceinline__ std::uint32_t cluster_size() {
  std::uint32_t size = 0;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank = 0;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ std::uint32_t cluster_index() {
  std::uint32_t index = 0;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

/// The barrier of all threads of the cluster: what a thread did before is visible to all of them. Takes about a
/// microsecond, since it waits for all of a thread's writes; cluster_arrive and cluster_wait do not.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

/// The two halves of the barrier of all threads of the cluster; it orders nothing but them.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

/// Orders what this thread did before what it does after, for all of the cluster.
__device__ __forceinline__ void cluster_fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

/// The same variable of this block's shared memory in that of block `rank`.
template <typename T>
__device__ __forceinline__ T* of_block(T* shared, std::uint32_t rank) {
  std::uint64_t remote = 0;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(reinterpret_cast<std::uint64_t>(shared)), "r"(rank));
  return reinterpret_cast<T*>(remote);
}

/// Adds to a number in the shared memory of block `rank`; returns what it was.
__device__ __forceinline__ std::int32_t add_to_block(std::int32_t* shared, std::uint32_t rank, std::int32_t value) {
  std::int32_t before = 0;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(remote_address(shared_address(shared), rank)), "r"(value)
               : "memory");
  return before;
}

/// Writes to the shared memory of block `rank`; its `barrier` counts the bytes as they arrive.
__device__ __forceinline__ void store_async(std::uint64_t* shared, std::uint32_t rank, std::uint64_t value,
                                            Mbarrier& barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                   remote_address(shared_address(shared), rank)),
               "l"(value), "r"(remote_address(shared_address(&barrier), rank))
               : "memory");
}

}  // namespace echo::ptx
