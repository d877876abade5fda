#include "kernels/cuda_backend.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cache_manager/begin.cuh"
#include "cache_manager/fetch_forecast.cuh"
#include "cache_manager/recall.cuh"
#include "cache_manager/release.cuh"
#include "echo/errors.hpp"
#include "kernels/append.hpp"
#include "kernels/attend.hpp"
#include "kernels/attend_cluster.hpp"
#include "kernels/call_checks.hpp"
#include "kernels/captured_graph.hpp"
#include "kernels/commit.hpp"
#include "kernels/device_code.hpp"
#include "kernels/device_guard.hpp"
#include "kernels/score.hpp"
#include "kernels/score_sm90.hpp"
#include "kernels/select.hpp"
#include "kernels/select_cluster.hpp"
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
      attend_cluster_ = plan_attend_cluster(sizes.shape, sizes.splits, device_);
      if (sizes.forecast_cap > 0) {
        const int left = multiprocessors_ - kForecastSms;
        attend_cluster_.clusters = std::min(attend_cluster_.clusters, std::max(1, left / sizes.splits));
      }
    }
  }
  score_sm90_ = own_kernels_ && prepare_score_sm90(sizes.shape, device_);
  if (own_kernels_) {
    select_cluster_ = plan_select_cluster(device_);
  }
  Scratch& scratch = scratch_.emplace(device_memory_, sizes);
  fill(scratch.data(), 0, scratch.bytes());
  attend_cluster_.handing = scratch.attend_cluster();
}

const Scratch& CudaBackend::scratch() const {
  if (!scratch_) {
    throw StateError("backend: prepare has to be called before any verb");
  }
  return *scratch_;
}

const Scratch& CudaBackend::scratch_for(const LayerView& layer, std::int32_t rows, std::int32_t block_rows) const {
  const ScratchSizes& sizes = scratch().sizes();
  require_at_most("rows", rows, sizes.rows);
  require_at_most("block", block_rows, sizes.block_rows);
  require_at_most("slots", layer.slots, sizes.slots);
  require_at_most("host_rows", layer.host_rows, sizes.host_rows);
  return scratch();
}

void CudaBackend::check_rows(const LayerView& layer, std::int32_t rows, std::int32_t block_rows, const void* kv,
                             DType kv_dtype) const {
  static_cast<void>(scratch_for(layer, rows, block_rows));
  require_pieces("host_row_stride", layer.host_stride);
  require_pieces("row_bytes", layer.row_bytes);
  if (kv_dtype == DType::u8 && reinterpret_cast<std::uintptr_t>(kv) % sizeof(std::uint32_t) != 0) {
    throw InvalidArgument("kv: encoded rows have to be aligned to 4 bytes");
  }
}

const LayerView* CudaBackend::on_device(std::span<const LayerView> layers) {
  const Scratch& memory = scratch();
  require_at_most("layers", std::ssize(layers), memory.sizes().layers);
  // A runtime's views never change: one upload serves all its calls.
  if (layers.size() != layers_on_device_.size() ||
      std::memcmp(layers.data(), layers_on_device_.data(), layers.size_bytes()) != 0) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    ECHO_CUDA_CHECK(cudaStreamIsCapturing(stream_, &status));
    if (status != cudaStreamCaptureStatusNone) {
      throw StateError("layers: they have to be used once before a graph with them is captured");
    }
    staging_.upload(memory.layers(), layers.data(), layers.size_bytes(), stream_);
    layers_on_device_.assign(layers.begin(), layers.end());
  }
  return memory.layers();
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

void CudaBackend::begin(const BeginParams& params) {
  const DeviceGuard guard(device_);
  forecasts_.join(pass());
  launch_begin(params, params.layers.empty() ? nullptr : on_device(params.layers), context());
}

void CudaBackend::append(const AppendParams& params) {
  const DeviceGuard guard(device_);
  check_rows(params.layer, params.step.rows, 0, params.kv, params.kv_dtype);
  forecasts_.join_pool(params.layer.pool, pass());
  if (params.kv != nullptr || params.index_key != nullptr) {
    launch_append(params, context());
  }
}

void CudaBackend::score(const ScoreParams& params) {
  const DeviceGuard guard(device_);
  const Scratch& memory = scratch_for(params.layer, params.step.rows, params.block.count);
  forecasts_.join_found(pass());  // they read the last scores
  if (params.sift.rows != nullptr) {
    check_rows(params.layer, params.step.rows, params.block.count, nullptr, DType::u8);
    forecasts_.join_pool(params.layer.pool, pass());
  }
  if (score_sm90_) {
    LaunchContext launch = context();
    if (forecasts_.fetching(pass()) != nullptr) {
      launch.multiprocessors -= fetch_forecast_blocks();  // all its blocks run together
    }
    return launch_score_sm90(params, memory.prefetch_queue(), launch);
  }
  clear_next_sift(params);  // what this call leaves zero itself says that nothing was sifted
  if (params.index_key != nullptr) {
    launch_append(keys_of(params), context());
  }
  launch_index_queries(params, memory.index_queries(), context());
  launch_score(params, memory.index_queries(), context());
}

void CudaBackend::clear_next_sift(const ScoreParams& params) {
  if (params.sift.next_rows != nullptr) {
    const auto rows = static_cast<std::size_t>(params.block.count);
    ECHO_CUDA_CHECK(cudaMemsetAsync(params.sift.next_rows, 0, rows * sizeof(RowSift), stream_));
  }
  if (params.sift.next_prefetched != nullptr) {
    ECHO_CUDA_CHECK(cudaMemsetAsync(params.sift.next_prefetched, 0, sizeof(std::int32_t), stream_));
  }
}

void CudaBackend::select(const SelectParams& params) {
  const DeviceGuard guard(device_);
  NearLists near = scratch().near();
  forecasts_.join_found(pass());  // in what select left
  near_left_ = fits_select_cluster(params, select_cluster_);
  if (near_left_) {
    near.ended = forecasts_.fetching(pass());
    forecasts_.ending();
    return launch_select_cluster(params, select_cluster_, near, context(/*waits=*/true));
  }
  launch_select(params, context());
}

void CudaBackend::recall(const RecallParams& params) {
  const DeviceGuard guard(device_);
  check_rows(params.layer, params.step.rows, params.block.count, params.kv, params.kv_dtype);
  forecasts_.join_pool(params.layer.pool, pass());
  launch_recall(params, scratch().sizes().forecast_cap > 0, context(/*waits=*/true));
}

void CudaBackend::forecast(const ForecastParams& params) {
  const DeviceGuard guard(device_);
  check_rows(params.layer, params.step.rows, params.block.count, nullptr, DType::u8);
  const ScratchSizes& sizes = scratch().sizes();
  require_at_most("layer", params.index + 1, sizes.layers);
  require_at_most("sessions", params.step.rows / params.step.query_rows, sizes.entries);
  require_at_most("forecast_cap", params.cap, sizes.forecast_cap);
  ForecastLists lists = scratch().forecast(params.index);
  lists.cap = std::min(lists.cap, params.cap);
  if (lists.cap == 0 || !near_left_) {
    return;
  }
  forecasts_.add(params, scratch().near(), lists, pass());
}

void CudaBackend::attend(const AttendParams& params) {
  const DeviceGuard guard(device_);
  const Scratch& memory = scratch_for(params.layer, 0, params.block.count);
  require_at_most("attention_splits", params.splits, memory.sizes().splits);
  if (attend_cluster_.clusters > 0 && params.splits == attend_cluster_.splits) {
    LaunchContext launch = context();
    launch.begun = forecasts_.attention_begun(params.layer.pool);
    const int blocks = launch_attend_cluster(params, attend_cluster_, launch);
    return forecasts_.attended(params.layer.pool, multiprocessors_ - blocks, pass());
  }
  for (std::int32_t first = 0; first < params.block.count; first += kAttendRows) {
    const std::int32_t count = std::min(kAttendRows, params.block.count - first);
    launch_attend_splits(params, first, count, memory.attend_partials(), context());
    launch_attend_combine(params, first, count, memory.attend_partials(), context());
  }
  forecasts_.attended(params.layer.pool, 0, pass());
}

void CudaBackend::commit(const CommitParams& params) {
  const DeviceGuard guard(device_);
  forecasts_.join_found(pass());  // they read k-th scores
  launch_commit(params, context());
  forecasts_.join(pass());
}

void CudaBackend::release(std::span<const LayerView> layers, std::span<const RowRun> rows) {
  const DeviceGuard guard(device_);
  if (layers.empty()) {
    return;
  }
  forecasts_.join(pass());
  const std::vector<RowRun> runs = short_runs(rows, layers.front().host_rows);
  launch_release(on_device(layers), static_cast<std::int32_t>(layers.size()), runs, context());
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
  const DeviceGuard guard(device_);
  forecasts_.retire();
  ECHO_CUDA_WARN(cudaStreamSynchronize(stream_));
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
