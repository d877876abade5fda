#pragma once
// Barriers of Hopper as PTX has them: mbarriers in shared memory, local or of another block of the cluster. The barrier
// of the whole cluster is in cluster.cuh, those of part of a block are in warp.cuh.

#include <cstdint>

namespace echo::ptx {

/// Address of shared memory as PTX instructions take it.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ std::uint32_t remote_address(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t remote = 0;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

/// Returns what a waiting instruction says of the phase of `parity` of the barrier at an address.
#define ECHO_PHASE_COMPLETED(instruction, address) \
  std::uint32_t done = 0;                          \
  asm volatile(                                    \
      "{\n"                                        \
      ".reg .pred p;\n" instruction                \
      ".shared::cta.b64 p, [%1], %2;\n"            \
      "selp.u32 %0, 1, 0, p;\n"                    \
      "}"                                          \
      : "=r"(done)                                 \
      : "r"(address), "r"(parity)                  \
      : "memory");                                 \
  return done != 0

/// A phase completes when `count` arrivals and all bytes that were announced have come; then the next one begins.
/// Phases have parity 0, 1, 0, ... Arriving releases what the thread wrote before, waiting acquires it.
struct Mbarrier {
  std::uint64_t state;

  __device__ __forceinline__ void init(std::uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(count) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// Arrives once the copies are there that this thread has started (copy_async): one of the `count`.
  __device__ __forceinline__ void arrive_with_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// Arrives and announces bytes that a copy will bring.
  __device__ __forceinline__ void arrive_expecting(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }
  /// Arrives at this barrier of block `rank`, announcing bytes that stores will bring there; tells of nothing that the
  /// caller has written.
  __device__ __forceinline__ void arrive_remote_expecting(std::uint32_t rank, std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(
                     remote_address(shared_address(this), rank)),
                 "r"(bytes)
                 : "memory");
  }
  /// Waits until the phase of this parity has completed. A fresh barrier counts as having completed parity 1.
  __device__ __forceinline__ void wait(std::uint32_t parity) {
    while (!try_wait(parity)) {
    }
  }
  /// The same, also for arrivals from other blocks.
  __device__ __forceinline__ void wait_cluster(std::uint32_t parity) {
    while (!try_wait_cluster(parity)) {
    }
  }

 private:
  __device__ __forceinline__ bool try_wait(std::uint32_t parity) {
    ECHO_PHASE_COMPLETED("mbarrier.try_wait.parity.acquire.cta", shared_address(this));
  }
  __device__ __forceinline__ bool try_wait_cluster(std::uint32_t parity) {
    ECHO_PHASE_COMPLETED("mbarrier.try_wait.parity.acquire.cluster", shared_address(this));
  }
};
static_assert(sizeof(Mbarrier) == 8);

/// A barrier in arrays of them, by its address: nothing has to be worked out anew in a short loop.
struct MbarrierAt {
  std::uint32_t address;

  __device__ __forceinline__ MbarrierAt(std::uint32_t first, std::int32_t index)
      : address(first + static_cast<std::uint32_t>(index) * static_cast<std::uint32_t>(sizeof(Mbarrier))) {}

  __device__ __forceinline__ void arrive() const {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  __device__ __forceinline__ void arrive_expecting(std::uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(std::uint32_t parity) const {
    while (!try_wait(parity)) {
    }
  }

 private:
  __device__ __forceinline__ bool try_wait(std::uint32_t parity) const {
    ECHO_PHASE_COMPLETED("mbarrier.try_wait.parity.acquire.cta", address);
  }
};
#undef ECHO_PHASE_COMPLETED

/// Makes freshly initialised mbarriers visible to the other blocks of the cluster; to the copy engine, with
/// fence_proxy_async behind it.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace echo::ptx
