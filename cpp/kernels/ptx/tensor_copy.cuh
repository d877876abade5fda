#pragma once
// Copies of boxes of a tensor map by the copy engine. One thread starts them; their bytes arrive at an mbarrier.

#include <cuda.h>

#include <cstdint>

#include "kernels/ptx/barrier.cuh"

namespace echo::ptx {

/// One lane of a warp that is there as a whole, chosen so that the compiler knows that it is one.
__device__ __forceinline__ bool elect() {
  std::uint32_t elected = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

/// How the L2 cache is to treat what a copy reads: give it up first if nobody will read it again.
__device__ __forceinline__ std::uint64_t create_policy(bool read_again) {
  std::uint64_t policy = 0;
  if (read_again) {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

/// The map has to be a __grid_constant__ parameter of the kernel.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

/// Copies box (x, y, z) of a map to shared memory.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, std::int32_t x, std::int32_t y,
                                         std::int32_t z, Mbarrier& barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}
/// The same, by addresses in shared memory.
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, std::int32_t x, std::int32_t y,
                                         std::int32_t z, MbarrierAt barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(barrier.address), "l"(policy)
      : "memory");
}

}  // namespace echo::ptx
