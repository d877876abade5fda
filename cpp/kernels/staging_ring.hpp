#pragma once

#include <array>
#include <cstddef>

#include "kernels/cuda_handles.hpp"

namespace echo {

/// Pinned buffers through which small data goes to the device without making the caller wait:
/// upload() copies the data aside and returns, and waits only where all buffers are still under
/// way.
class StagingRing {
 public:
  StagingRing();
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  /// `host` may be reused at once.
  void upload(void* device, const void* host, std::size_t bytes, cudaStream_t stream);

 private:
  static constexpr std::size_t kSlotBytes = std::size_t{1} << 20;
  static constexpr std::size_t kSlots = 8;

  std::array<Event, kSlots> copied_;  ///< the slot's last copy is done
  std::byte* memory_ = nullptr;
  std::size_t next_ = 0;
};

}  // namespace echo
