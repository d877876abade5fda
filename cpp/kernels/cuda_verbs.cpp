// The verbs of CudaBackend: which kernels they are, and what has to be waited for before.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cache_manager/begin.cuh"
#include "cache_manager/fetch_forecast.cuh"
#include "cache_manager/recall.cuh"
#include "cache_manager/release.cuh"
#include "echo/errors.hpp"
#include "kernels/append.hpp"
#include "kernels/attend.hpp"
#include "kernels/attend_sm90.hpp"
#include "kernels/call_checks.hpp"
#include "kernels/commit.hpp"
#include "kernels/cuda_backend.hpp"
#include "kernels/device_guard.hpp"
#include "kernels/score.hpp"
#include "kernels/score_sm90.hpp"
#include "kernels/select.hpp"
#include "kernels/select_cluster.hpp"

namespace echo {

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
  if (attend_sm90_.teams > 0 && params.splits == attend_sm90_.splits) {
    LaunchContext launch = context(/*waits=*/true);
    launch.begun = forecasts_.attention_begun(params.layer.pool);
    launch.early = launch.early && launch.begun == nullptr;  // what waits for that event comes behind recall
    const int blocks = launch_attend_sm90(params, attend_sm90_, memory.attend_exchange(), launch);
    return forecasts_.attended(params.layer.pool, multiprocessors_ - blocks, blocks > 0, pass());
  }
  for (std::int32_t first = 0; first < params.block.count; first += kAttendRows) {
    const std::int32_t count = std::min(kAttendRows, params.block.count - first);
    launch_attend_splits(params, first, count, memory.attend_partials(), context());
    launch_attend_combine(params, first, count, memory.attend_partials(), context());
  }
  forecasts_.attended(params.layer.pool, 0, false, pass());
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

}  // namespace echo
