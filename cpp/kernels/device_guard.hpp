#pragma once

#include "kernels/cuda_check.hpp"

namespace echo {

/// Makes a device current for the life of the guard: callers (and other libraries) may have chosen
/// another.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    ECHO_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ != device) {
      ECHO_CUDA_CHECK(cudaSetDevice(device));
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) {
      ECHO_CUDA_WARN(cudaSetDevice(previous_));
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace echo
