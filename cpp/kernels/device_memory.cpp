#include "kernels/device_memory.hpp"

#include "echo/errors.hpp"
#include "kernels/device_guard.hpp"

namespace echo {

void* DeviceMemory::allocate(std::size_t bytes, const std::string& what) {
  const DeviceGuard guard(device_);
  void* pointer = nullptr;
  const cudaError_t error = cudaMalloc(&pointer, bytes);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free = 0;
    std::size_t total = 0;
    ECHO_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    throw CapacityError(what + ": " + std::to_string(bytes) +
                        " bytes of memory asked of cuda:" + std::to_string(device_) + ", " + std::to_string(free) +
                        " of " + std::to_string(total) + " are free");
  }
  ECHO_CUDA_CHECK(error);
  return pointer;
}

void DeviceMemory::deallocate(void* pointer, std::size_t /*bytes*/) noexcept {
  ECHO_CUDA_WARN(cudaFree(pointer));  // finds the device by the address
}

}  // namespace echo
