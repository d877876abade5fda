#include "reference/cpu_backend.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "echo/errors.hpp"
#include "reference/append.hpp"
#include "reference/attend.hpp"
#include "reference/cache_ops.hpp"
#include "reference/commit.hpp"
#include "reference/forecast.hpp"
#include "reference/new_rows.hpp"
#include "reference/owners.hpp"
#include "reference/recall.hpp"
#include "reference/score.hpp"
#include "reference/select.hpp"
#include "reference/sift.hpp"
#include "runtime/backends.hpp"

namespace echo {
namespace {

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) {  // pointers may be null then, which memcpy does not allow
    std::memcpy(to, from, bytes);
  }
}

void require_inside(const LayerView& layer, const RowRun& run) {
  if (run.first < 0 || run.count < 0 || static_cast<std::int64_t>(run.first) + run.count > layer.host_rows) {
    throw InvalidArgument("rows: " + std::to_string(run.first) + " + " + std::to_string(run.count) +
                          " given, the host pool has " + std::to_string(layer.host_rows));
  }
}

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(std::int64_t threads) { return std::make_unique<CpuBackend>(threads); }

CpuBackend::CpuBackend(std::int64_t threads, SimdLevel level) : pool_(threads), loops_(simd_loops(level)) {}

void CpuBackend::use_stream(std::uintptr_t /*stream*/) {}

void CpuBackend::copy_to_device(void* device, const void* host, std::size_t bytes) { copy(device, host, bytes); }
void CpuBackend::copy_to_host(void* host, const void* device, std::size_t bytes) { copy(host, device, bytes); }
void CpuBackend::upload_control(void* device, const void* host, std::size_t bytes) { copy(device, host, bytes); }

void CpuBackend::fill(void* device, int byte, std::size_t bytes) {
  if (bytes != 0) {
    std::memset(device, byte, bytes);
  }
}

void CpuBackend::begin(const BeginParams& params) {
  note_owners(params);
  claim_new_rows(pool_, params);
  if (params.sift_rows != nullptr) {
    std::fill_n(params.sift_rows, params.step.rows, RowSift{});
    *params.prefetched = 0;
  }
}
void CpuBackend::append(const AppendParams& params) { append_rows(pool_, params); }
void CpuBackend::score(const ScoreParams& params) {
  if (params.index_key != nullptr) {
    append_rows(pool_, keys_of(params));
  }
  score_rows(pool_, loops_.score, params);
  if (params.sift.rows != nullptr) {
    sift_rows(pool_, params);
  }
}
void CpuBackend::select(const SelectParams& params) { select_rows(pool_, params); }
void CpuBackend::recall(const RecallParams& params) { recall_rows(pool_, params); }
void CpuBackend::forecast(const ForecastParams& params) { forecast_rows(pool_, params); }
void CpuBackend::attend(const AttendParams& params) { attend_rows(pool_, loops_.attend, params); }
void CpuBackend::commit(const CommitParams& params) { commit_thresholds(params); }

void CpuBackend::release(std::span<const LayerView> layers, std::span<const RowRun> rows) {
  for (const LayerView& layer : layers) {
    for (const RowRun& run : rows) {
      require_inside(layer, run);
    }
  }
  pool_.parallel_for(static_cast<std::int64_t>(layers.size()), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      CacheOps cache(layers[static_cast<std::size_t>(i)]);
      for (const RowRun& run : rows) {
        for (std::int32_t row = run.first; row < run.first + run.count; ++row) {
          cache.release(row);
        }
      }
    }
  });
}

}  // namespace echo
