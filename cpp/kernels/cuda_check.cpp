#include "kernels/cuda_check.hpp"

#include <cstdio>
#include <cstring>
#include <string>

#include "echo/errors.hpp"

namespace echo {
namespace {

/// Last component of a path: where the library was built is nobody's business.
const char* file_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

}  // namespace

void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line) {
  // The error is reported here, so it must not come back from the next cudaGetLastError.
  static_cast<void>(cudaGetLastError());
  throw CudaError(std::string(call) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ") at " +
                  file_name(file) + ":" + std::to_string(line));
}

void warn_cuda_error(cudaError_t error, const char* call, const char* file, int line) noexcept {
  static_cast<void>(cudaGetLastError());
  if (error == cudaErrorCudartUnloading) {
    return;  // the process is exiting and the driver has released everything already
  }
  std::fprintf(stderr, "echo: %s: %s at %s:%d\n", call, cudaGetErrorString(error), file_name(file), line);
}

}  // namespace echo
