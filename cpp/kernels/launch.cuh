#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda_check.hpp"
#include "kernels/launch.hpp"

namespace echo {

/// Launches a kernel on the context's stream and checks that it was accepted. An empty grid is no
/// launch.
template <typename... Parameters, typename... Arguments>
void launch(const LaunchContext& context, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            std::size_t shared_bytes, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = context.stream;
  ECHO_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

/// The attribute of a launch that need not wait for the end of the one before.
inline cudaLaunchAttribute early_launch() {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  return early;
}

/// The attribute of a launch that records an event when all its blocks have begun.
inline cudaLaunchAttribute begun_event(cudaEvent_t event) {
  cudaLaunchAttribute begun{};
  begun.id = cudaLaunchAttributeLaunchCompletionEvent;
  begun.val.launchCompletionEvent.event = event;
  return begun;
}

/// Likewise, for a kernel that may begin while the one before it on the stream ends, where the context says so: all its
/// threads have to wait_for_kernel_before. Records the context's event.
template <typename... Parameters, typename... Arguments>
void launch_early(const LaunchContext& context, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                  std::size_t shared_bytes, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return;
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = context.stream;
  config.attrs = attributes;
  if (context.early) {
    attributes[config.numAttrs++] = early_launch();
  }
  if (context.begun != nullptr) {
    attributes[config.numAttrs++] = begun_event(context.begun);
  }
  ECHO_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

/// A launch of clusters of `blocks` thread blocks each, likewise early.
struct ClusterLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2] = {};

  ClusterLaunch(const LaunchContext& context, std::int32_t blocks, std::int64_t clusters, std::int32_t threads,
                std::size_t shared_bytes) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(blocks * clusters));
    config.blockDim = static_cast<unsigned>(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = context.stream;
    config.attrs = attributes;
    config.numAttrs = 1;
    if (context.early) {
      attributes[config.numAttrs++] = early_launch();
    }
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

/// In a kernel of launch_early: until what ran before on the stream has ended and its writes are seen. All threads call
/// it before they end, so the end of the kernel ahead is the end of all before it, too. What came before a chain of
/// early launches is complete anyway. Until then nothing may be written that a kernel of the chain reads or writes, and
/// what one writes may be read as a guess only.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel on the stream begin, if it is of launch_early: it waits for this one's end, but is there then.
/// It begins when of each block a thread has called this, or all have ended; so all blocks run by then.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Blocks of `per_block` that cover `count`.
inline unsigned blocks_for(std::int64_t count, std::int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace echo
