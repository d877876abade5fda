// The CUDA backend of builds without CUDA: there is none.
#include "echo/errors.hpp"
#include "echo/host_memory.hpp"
#include "runtime/backends.hpp"

namespace echo {

int cuda_device_count() noexcept { return 0; }

std::unique_ptr<Backend> make_cuda_backend(int device, const RuntimeConfig& /*config*/) {
  throw NotSupported("device: cuda:" + std::to_string(device) +
                     " given, but this build has no CUDA backend; build with ECHO_CUDA=ON (CMake: "
                     "-DECHO_CUDA=ON), which needs nvcc");
}

std::int64_t cuda_free_bytes(int /*device*/) { return 0; }

void keep_host_memory(bool /*on*/) {}

std::size_t kept_host_bytes() { return 0; }

std::size_t cuda_scratch_bytes(const ScratchSizes& /*sizes*/) { return 0; }

}  // namespace echo
