#pragma once

#include <cuda_runtime_api.h>

#include "kernels/kernel_errors.hpp"

namespace echo {

/// What every kernel launch needs besides its parameters.
struct LaunchContext {
  cudaStream_t stream;
  int multiprocessors;  ///< of the device: grids that loop over their work are sized by it
  KernelErrorView errors;
  bool early = false;  ///< the launch before is one of this backend, and a kernel may begin before it has ended
  cudaEvent_t begun = nullptr;  ///< for launch_early: recorded when all its blocks have begun
};

}  // namespace echo
