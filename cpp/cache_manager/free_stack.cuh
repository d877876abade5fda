#pragma once
// FreeStack: the stack of free slots, from which all blocks of a launch take at the same time. Hints lie in the same
// memory (hints.hpp) and are left by blocks that find the stack empty. It may be empty because others have just taken
// what was on it, and are still reading it: each block that finds free slots says so, in a word that is read together
// with their number, before it takes any.

#include <cstddef>
#include <cstdint>

#include "cache_manager/residency.cuh"
#include "kernels/ptx/copy.cuh"
#include "kernels/warp.cuh"

namespace echo {

/// At one moment.
struct FreeStack {
  std::int32_t free;
  std::int32_t popped;  ///< as in ReplacementState

  __device__ explicit FreeStack(const LayerView& layer) {
    static_assert(offsetof(ReplacementState, free) % sizeof(std::uint64_t) == 0);
    static_assert(offsetof(ReplacementState, popped) == offsetof(ReplacementState, free) + sizeof free);
    const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> words(
        *reinterpret_cast<std::uint64_t*>(&layer.replacement->free));
    const std::uint64_t both = words.load(cuda::memory_order_relaxed);
    free = static_cast<std::int32_t>(both);
    popped = static_cast<std::int32_t>(both >> 32U);
  }
};

/// Takes slots from the stack of free ones, for a launch in which nobody pushes: those below the index that is
/// returned, the top of the stack until then, are the caller's, as many as there are and at most `needed`.
__device__ inline std::int32_t pop_free(const LayerView& layer, std::int32_t needed) {
  const std::int32_t top = atomicSub(&layer.replacement->free, needed);
  if (top < needed) {  // what is below zero is nothing; others may have emptied the stack since somebody looked
    atomicMax(&layer.replacement->free, 0);
  }
  return top;
}

/// By the claimers of a recall that found free slots, long before it takes any: tells the blocks which find none
/// because others took them that those are still reading, and brings what will be taken closer. (A fence, for which
/// nobody should wait who has rows to fetch.)
__device__ inline void expect_to_pop(const LayerView& layer, const FreeStack& stack, std::int32_t now,
                                     std::int32_t claimer) {
  constexpr std::int32_t kWordsOfLine = ptx::kCacheLine / static_cast<std::int32_t>(sizeof(std::int32_t));
  const std::int32_t word = stack.free - 1 - claimer * kWordsOfLine;
  if (claimer < kWarp && word >= 0) {
    ptx::prefetch(layer.free_slots + word);
  }
  if (claimer == 0) {
    AtomicWord(layer.replacement->popped).store(now, cuda::memory_order_relaxed);
    cuda::atomic_thread_fence(cuda::memory_order_release, cuda::thread_scope_device);
  }
}

}  // namespace echo
