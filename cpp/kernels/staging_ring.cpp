#include "kernels/staging_ring.hpp"

#include <algorithm>
#include <cstring>

namespace echo {

StagingRing::StagingRing() {
  void* memory = nullptr;
  ECHO_CUDA_CHECK(cudaHostAlloc(&memory, kSlots * kSlotBytes, cudaHostAllocDefault));
  memory_ = static_cast<std::byte*>(memory);
}

StagingRing::~StagingRing() {
  for (const Event& event : copied_) {
    ECHO_CUDA_WARN(cudaEventSynchronize(event.get()));  // its buffer is about to go
  }
  ECHO_CUDA_WARN(cudaFreeHost(memory_));
}

void StagingRing::upload(void* device, const void* host, std::size_t bytes, cudaStream_t stream) {
  for (std::size_t done = 0; done < bytes; done += kSlotBytes) {
    const std::size_t part = std::min(kSlotBytes, bytes - done);
    std::byte* slot = memory_ + next_ * kSlotBytes;
    if (!copied_[next_]
             .done()) {  // steady steps never get here: a synchronising call costs even where it need not wait
      copied_[next_].wait();
    }
    std::memcpy(slot, static_cast<const std::byte*>(host) + done, part);
    ECHO_CUDA_CHECK(
        cudaMemcpyAsync(static_cast<std::byte*>(device) + done, slot, part, cudaMemcpyHostToDevice, stream));
    copied_[next_].record(stream);
    next_ = (next_ + 1) % kSlots;
  }
}

}  // namespace echo
