#include "kernels/forecast_branch.hpp"

#include <algorithm>

namespace echo {
namespace {

unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  ECHO_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

}  // namespace

void ForecastBranch::fork(cudaStream_t stream, const void* pool) {
  capture_ = capture_of(stream);
  forked_.record(stream);
  ECHO_CUDA_CHECK(cudaStreamWaitEvent(find_.get(), forked_.get(), 0));
  pools_.push_back(pool);
}

void ForecastBranch::found() {
  found_.record(find_.get());
  finding_ = true;
  ECHO_CUDA_CHECK(cudaStreamWaitEvent(fetch_.get(), found_.get(), 0));
}

void ForecastBranch::fetched() { fetched_.record(fetch_.get()); }

void ForecastBranch::join_found(cudaStream_t stream) {
  if (finding_ && same_capture(stream)) {
    ECHO_CUDA_CHECK(cudaStreamWaitEvent(stream, found_.get(), 0));
  }
  finding_ = false;
}

void ForecastBranch::join(cudaStream_t stream) {
  if (!pools_.empty() && same_capture(stream)) {
    ECHO_CUDA_CHECK(cudaStreamWaitEvent(stream, fetched_.get(), 0));
  }
  pools_.clear();
  finding_ = false;
}

void ForecastBranch::join_layer(cudaStream_t stream, const void* pool) {
  if (std::ranges::find(pools_, pool) != pools_.end()) {
    join(stream);
  }
}

bool ForecastBranch::same_capture(cudaStream_t stream) {
  if (capture_of(stream) == capture_) {
    return true;
  }
  pools_.clear();
  finding_ = false;
  return false;
}

}  // namespace echo
