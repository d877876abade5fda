#pragma once

#include <cuda_runtime_api.h>

namespace echo {

/// Throws CudaError: "cudaMalloc(...): out of memory (cudaErrorMemoryAllocation) at
/// pinned_memory.cpp:42".
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line);
/// Says the same on stderr.
void warn_cuda_error(cudaError_t error, const char* call, const char* file, int line) noexcept;

}  // namespace echo

/// Throws CudaError if the call fails:
///   ECHO_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream));
#define ECHO_CUDA_CHECK(call)                                                \
  do {                                                                       \
    const cudaError_t echo_cuda_error_ = (call);                             \
    if (echo_cuda_error_ != cudaSuccess) {                                   \
      ::echo::throw_cuda_error(echo_cuda_error_, #call, __FILE__, __LINE__); \
    }                                                                        \
  } while (false)

/// For destructors and roll-back: reports a failure on stderr and goes on.
///   ECHO_CUDA_WARN(cudaFree(data));
#define ECHO_CUDA_WARN(call)                                                \
  do {                                                                      \
    const cudaError_t echo_cuda_error_ = (call);                            \
    if (echo_cuda_error_ != cudaSuccess) {                                  \
      ::echo::warn_cuda_error(echo_cuda_error_, #call, __FILE__, __LINE__); \
    }                                                                       \
  } while (false)
