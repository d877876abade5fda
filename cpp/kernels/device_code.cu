#include <string>

#include "echo/errors.hpp"
#include "kernels/cuda_check.hpp"
#include "kernels/device_code.hpp"

namespace echo {
namespace {

/// Stands for all kernels: they are built for the same architectures.
__global__ void any_kernel() {}

}  // namespace

int require_device_code(int device) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(any_kernel));
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    static_cast<void>(cudaGetLastError());
    int major = 0;
    int minor = 0;
    ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    const std::string architecture = std::to_string(major) + std::to_string(minor);
    throw NotSupported("device: cuda:" + std::to_string(device) + " is of architecture " + architecture +
                       ", for which this build has no code; build with "
                       "ECHO_CUDA_ARCHITECTURES=" +
                       architecture);
  }
  ECHO_CUDA_CHECK(error);
  return attributes.ptxVersion;
}

}  // namespace echo
