#pragma once

#include "kernels/cuda_check.hpp"

namespace echo {

/// A stream that does not synchronise with the default stream.
class Stream {
 public:
  Stream() { ECHO_CUDA_CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
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
