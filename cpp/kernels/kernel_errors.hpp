#pragma once
// How kernels report what they must not act on: a word per kind of error in mapped host memory. A
// kernel that meets such an input treats it as absent, sets the word and goes on; the words stay
// set until the host, after it has waited for the stream, turns them into an exception. Nothing is
// read back within a step.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cache_manager/address.hpp"

namespace echo {

enum class KernelError : std::int32_t {
  bad_position,    ///< a row's position or host block lies outside the cache
  bad_selection,   ///< an entry of a selection is no position of its row's context
  pool_exhausted,  ///< the call needs more slots than can be taken
  bad_slot,        ///< attend was given a slot that the pool does not have
};
inline constexpr std::int32_t kKernelErrors = 4;

/// What kernels see of the words.
struct KernelErrorView {
  volatile std::uint32_t* words;
  /// All threads write the same value, so that no atomic operation on host memory is needed.
  ECHO_HOST_DEVICE void raise(KernelError error) const { words[static_cast<std::int32_t>(error)] = 1U; }
};

/// Owns the words.
class KernelErrors {
 public:
  KernelErrors();
  ~KernelErrors();
  KernelErrors(const KernelErrors&) = delete;
  KernelErrors& operator=(const KernelErrors&) = delete;

  KernelErrorView view() const { return {device_}; }
  /// Call after waiting for the stream. Clears the words; throws InvalidArgument or StateError for
  /// the first that was set.
  void check();

 private:
  volatile std::uint32_t* host_ = nullptr;
  volatile std::uint32_t* device_ = nullptr;
};

}  // namespace echo
