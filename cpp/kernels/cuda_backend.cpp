#include "kernels/cuda_backend.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "echo/errors.hpp"
#include "kernels/attend.hpp"
#include "kernels/captured_graph.hpp"
#include "kernels/device_code.hpp"
#include "kernels/device_guard.hpp"
#include "kernels/score_sm90.hpp"
#include "runtime/backends.hpp"

namespace echo {

CudaBackend::CudaBackend(int device, bool own_kernels)
    : device_(device),
      own_kernels_(own_kernels),
      name_("cuda:" + std::to_string(device)),
      stream_(own_stream_.get()),
      device_memory_(device),
      pinned_memory_(device) {
  const int code = require_device_code(device);
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device));
  int major = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  early_launches_ = major >= 9 && code >= 90;
}

CudaBackend::~CudaBackend() { retire(); }

void CudaBackend::prepare(const ScratchSizes& sizes) {
  const DeviceGuard guard(device_);
  if (scratch_) {
    throw StateError("backend: it is prepared already");
  }
  if (sizes.shape.row_format != RowFormat::raw) {
    check_attend(sizes.shape, device_);
    if (own_kernels_) {
      attend_sm90_ = plan_attend_sm90(sizes.shape, sizes.splits, sizes.block_rows, device_);
      if (sizes.forecast_cap > 0) {
        const int left = multiprocessors_ - kForecastSms;
        attend_sm90_.teams = std::min(attend_sm90_.teams, std::max(1, left / sizes.splits));
      }
    }
  }
  score_sm90_ = own_kernels_ && prepare_score_sm90(sizes.shape, device_);
  if (own_kernels_) {
    select_cluster_ = plan_select_cluster(device_);
  }
  Scratch& scratch = scratch_.emplace(device_memory_, sizes);
  fill(scratch.data(), 0, scratch.bytes());
}

void CudaBackend::use_stream(std::uintptr_t stream) {
  const DeviceGuard guard(device_);
  const auto next = reinterpret_cast<cudaStream_t>(stream);
  if (next == stream_) {
    return;
  }
  forecasts_.join(pass());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  ECHO_CUDA_CHECK(cudaStreamIsCapturing(next, &status));
  if (status == cudaStreamCaptureStatusNone) {
    switched_.record(stream_);
    ECHO_CUDA_CHECK(cudaStreamWaitEvent(next, switched_.get(), 0));
  }
  stream_ = next;
}

void CudaBackend::copy(void* to, const void* from, std::size_t bytes, const void* host, cudaMemcpyKind kind) {
  const DeviceGuard guard(device_);
  forecasts_.join(pass());
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = pinned_memory_.copyable(static_cast<const std::byte*>(host) + done, bytes - done);
    ECHO_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(to) + done, static_cast<const std::byte*>(from) + done,
                                    part, kind, stream_));
    done += part;
  }
  ECHO_CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void CudaBackend::copy_to_device(void* device, const void* host, std::size_t bytes) {
  copy(device, host, bytes, host, cudaMemcpyHostToDevice);
}

void CudaBackend::copy_to_host(void* host, const void* device, std::size_t bytes) {
  copy(host, device, bytes, host, cudaMemcpyDeviceToHost);
}

void CudaBackend::fill(void* device, int byte, std::size_t bytes) {
  const DeviceGuard guard(device_);
  forecasts_.join(pass());
  ECHO_CUDA_CHECK(cudaMemsetAsync(device, byte, bytes, stream_));
}

void CudaBackend::read_counters(void* host, const void* device, std::size_t bytes) {
  const DeviceGuard guard(device_);
  ECHO_CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, counter_stream_.get()));
  ECHO_CUDA_CHECK(cudaStreamSynchronize(counter_stream_.get()));
}

void CudaBackend::upload_control(void* device, const void* host, std::size_t bytes) {
  const DeviceGuard guard(device_);
  forecasts_.join(pass());  // of a pass that failed
  errors_.check();          // a pass reports what the ones before it met, without waiting for them
  staging_.upload(device, host, bytes, stream_);
}

void CudaBackend::synchronize() {
  wait();
  errors_.check();
}

void CudaBackend::wait() {
  const DeviceGuard guard(device_);
  forecasts_.join(pass());
  ECHO_CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void CudaBackend::retire() noexcept {
  try {
    const DeviceGuard guard(device_);
    forecasts_.retire();
    ECHO_CUDA_WARN(cudaStreamSynchronize(stream_));
  } catch (const CudaError&) {
    // The device or its driver is gone: there is nothing to wait for.
  }
  stream_ = own_stream_.get();
}

std::uint64_t CudaBackend::mark() {
  const DeviceGuard guard(device_);
  marks_.emplace_back().record(stream_);
  return marks_done_ + marks_.size();
}

bool CudaBackend::done(std::uint64_t mark) {
  const DeviceGuard guard(device_);
  while (!marks_.empty() && marks_.front().done()) {
    marks_.pop_front();
    ++marks_done_;
  }
  return mark <= marks_done_;
}

std::function<void()> CudaBackend::capture(const std::function<void()>& body) {
  const DeviceGuard guard(device_);
  auto graph = std::make_shared<CapturedGraph>(stream_, body);
  return [this, graph = std::move(graph)] {
    const DeviceGuard current(device_);
    graph->launch(stream_);
  };
}

std::size_t cuda_scratch_bytes(const ScratchSizes& sizes) { return Scratch::bytes(sizes); }

std::unique_ptr<Backend> make_cuda_backend(int device, const RuntimeConfig& config) {
  const bool own_kernels = wants_own_kernels(config);
  const DeviceGuard guard(device);
  return std::make_unique<CudaBackend>(device, own_kernels);
}

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

std::int64_t cuda_free_bytes(int device) {
  const DeviceGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  ECHO_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(free);
}

}  // namespace echo
