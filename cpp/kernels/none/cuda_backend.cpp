// Linked where CUDA is off: there are no CUDA devices, and asking for one says how to get them.

#include "echo/errors.hpp"
#include "runtime/backends.hpp"

namespace echo {

int cuda_device_count() noexcept { return 0; }

std::unique_ptr<Backend> make_cuda_backend(int device, const RuntimeConfig&) {
  throw NotSupported("device: 'cuda:" + std::to_string(device) +
                     "' given, but this build has no CUDA; build with ECHO_CUDA=ON, where nvcc is found");
}

std::int64_t cuda_free_bytes(int) { return 0; }

}  // namespace echo
