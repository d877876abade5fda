#include "kernels/kernel_errors.hpp"

#include <array>
#include <cstddef>

#include "echo/errors.hpp"
#include "kernels/cuda_check.hpp"

namespace echo {

KernelErrors::KernelErrors() {
  void* host = nullptr;
  constexpr std::size_t kBytes = kKernelErrors * sizeof(std::uint32_t);
  ECHO_CUDA_CHECK(cudaHostAlloc(&host, kBytes, cudaHostAllocMapped | cudaHostAllocPortable));
  host_ = static_cast<volatile std::uint32_t*>(host);
  for (std::int32_t i = 0; i < kKernelErrors; ++i) {
    host_[i] = 0U;
  }
  void* device = nullptr;
  ECHO_CUDA_CHECK(cudaHostGetDevicePointer(&device, host, 0));
  device_ = static_cast<volatile std::uint32_t*>(device);
}

KernelErrors::~KernelErrors() { ECHO_CUDA_WARN(cudaFreeHost(const_cast<std::uint32_t*>(host_))); }

void KernelErrors::check() {
  std::array<bool, kKernelErrors> set{};
  for (std::int32_t i = 0; i < kKernelErrors; ++i) {
    set[static_cast<std::size_t>(i)] = host_[i] != 0U;
    if (set[static_cast<std::size_t>(i)]) {  // a word that a kernel sets meanwhile must stay
      host_[i] = 0U;
    }
  }
  const auto raised = [&](KernelError error) { return set[static_cast<std::size_t>(error)]; };
  if (raised(KernelError::bad_position)) {
    throw StateError(
        "positions, block_table: a row's position or host block lies outside the cache; it was "
        "left out");
  }
  if (raised(KernelError::bad_selection)) {
    throw InvalidArgument(
        "selection: an entry is no position of its row's context (0 to the row's own, or -1); it "
        "was left out");
  }
  if (raised(KernelError::pool_exhausted)) {
    throw StateError(
        "gpu_slots: a call needed more slots than are not in use by its step; its rows were left "
        "out");
  }
  if (raised(KernelError::bad_slot)) {
    throw StateError("slots: attend was given a slot that the pool does not have; it was left out");
  }
}

}  // namespace echo
