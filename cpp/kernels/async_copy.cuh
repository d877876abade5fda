#pragma once
// Barriers in shared memory and the copies that complete on them (sm_90): thin names for PTX.
//
// A barrier goes through phases. It leaves one when as many arrivals as it was made for and as many bytes as were
// announced have come in; who waits names the parity of the phase: 0 for the first, then 1, 0, ... A barrier that has
// just been made counts as having left a phase of parity 1. Arriving releases what the thread wrote before, waiting
// acquires it.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "kernels/warp.cuh"

namespace echo {

using SharedBarrier = std::uint64_t;

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void make_barrier(SharedBarrier& barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/// Lets the copy engine see barriers that this thread has made; the block has to synchronise behind it.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Lets tensor cores and the copy engine see what this thread wrote to shared memory.
__device__ inline void publish_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void arrive(SharedBarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// Arrives and announces bytes that a copy will bring.
__device__ inline void arrive_expecting(SharedBarrier& barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

/// Waits until the barrier has left the phase of this parity.
__device__ inline void wait(SharedBarrier& barrier, std::uint32_t parity) {
  std::uint32_t left = 0;
  while (left == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(left)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  }
}

/// Whether it has left that phase.
__device__ inline bool has_left(SharedBarrier& barrier, std::uint32_t parity) {
  std::uint32_t left = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(left)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return left != 0;
}

/// One lane of a warp that is there as a whole, chosen so that the compiler knows that it is one.
__device__ inline bool elect_lane() {
  std::uint32_t elected = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

/// How the L2 cache is to treat what a copy reads: give it up first if nobody will read it again.
__device__ inline std::uint64_t cache_policy(bool read_again) {
  std::uint64_t policy = 0;
  if (read_again) {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

/// The map has to be a __grid_constant__ parameter of the kernel.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

/// Copies box (x, y, z) of a map to shared memory; its bytes arrive at the barrier.
__device__ inline void copy_box(void* to, const CUtensorMap& map, std::int32_t x, std::int32_t y, std::int32_t z,
                                SharedBarrier& barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

/// A place in a ring of stages, and the parity of the phases that their barriers go through in this round.
struct RingPlace {
  std::int32_t stage;
  std::uint32_t parity = 0;

  /// `by` is at most the number of stages.
  __device__ void advance(std::int32_t by, std::int32_t stages) {
    stage += by;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1U;
    }
  }
};

}  // namespace echo
