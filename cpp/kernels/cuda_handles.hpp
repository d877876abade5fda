#pragma once

#include "kernels/cuda_check.hpp"

namespace echo {

/// Of the device that is current: what begins before work of others that is ready as well.
inline int first_priority() {
  int last = 0;
  int first = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&last, &first));
  return first;
}

/// A stream that does not synchronise with the default stream.
class Stream {
 public:
  explicit Stream(int priority = 0) {
    ECHO_CUDA_CHECK(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, priority));
  }
  ~Stream() { ECHO_CUDA_WARN(cudaStreamDestroy(handle_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

/// An event for ordering, without a time.
class Event {
 public:
  Event() { ECHO_CUDA_CHECK(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming)); }
  ~Event() { ECHO_CUDA_WARN(cudaEventDestroy(handle_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { ECHO_CUDA_CHECK(cudaEventRecord(handle_, stream)); }
  /// Waits until the work before the last record is done; at once if there was none.
  void wait() const { ECHO_CUDA_CHECK(cudaEventSynchronize(handle_)); }
  /// Whether that work is done, without waiting.
  bool done() const {
    const cudaError_t state = cudaEventQuery(handle_);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    ECHO_CUDA_CHECK(state);
    return true;
  }
  cudaEvent_t get() const { return handle_; }

 private:
  cudaEvent_t handle_ = nullptr;
};

}  // namespace echo
