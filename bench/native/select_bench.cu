// Times select: a CUDA graph of `layers` calls of the backend's verb, each with scores of its own and after a kernel
// that writes them, so that they are in the L2 cache as the indexer leaves them; the graph without select is timed
// beside it, and the difference is select's. A C API for ctypes: functions return 0, or -1 and
// echo_select_bench_error() says why. Memory belongs to the caller.
//
// With `bounds`, a kernel also lists the tokens that reach them, as score does when it sifts.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echo/runtime_config.hpp"
#include "guarded.hpp"
#include "kernels/cuda_check.hpp"
#include "kernels/cuda_handles.hpp"
#include "kernels/number_formats.hpp"
#include "kernels/warp.cuh"
#include "runtime/backend.hpp"
#include "runtime/backends.hpp"
#include "timed_graph.hpp"

#define ECHO_SELECT_BENCH_API extern "C" __attribute__((visibility("default")))

extern "C" struct EchoSelectCase {
  std::int32_t batch;
  std::int32_t length;
  std::int32_t score_stride;
  std::int32_t top_k;
  std::int32_t layers;
  std::int32_t capacity;           ///< of a list
  std::int32_t own_kernels;        ///< 0: the general one
  const std::int32_t* positions;   ///< [batch], on the device, as all that follows
  float* const* scores;            ///< by layer: [batch, score_stride]
  const float* bounds;             ///< [layers, batch] scores that listed tokens have at least; null: no lists
  std::int32_t* const* selection;  ///< by layer: [batch, top_k]
  float* kth_score;                ///< [batch]
};

namespace echo::bench {
namespace {

constexpr int kThreads = 256;

/// Writes the scores again; `factor` is 1.
__global__ void write_scores(float4* scores, std::int64_t count, float factor) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const float4 v = scores[i];
    scores[i] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  }
}

__global__ void list_tokens(const float* scores, std::int64_t stride, std::int32_t length, const float* bounds,
                            RowSift* rows, ScoredToken* tokens, std::int32_t capacity) {
  const auto row = static_cast<std::int32_t>(blockIdx.y);
  RowSift& sift = rows[row];
  const std::uint32_t bound = ordered_key(bounds[row]);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    sift.candidates = bound;
    sift.compared = length;
  }
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x); i < length;
       i += static_cast<std::int32_t>(gridDim.x) * kThreads) {
    const std::uint32_t key = ordered_key(scores[row * stride + i]);
    if (key >= bound) {
      const std::int32_t at = atomicAdd(&sift.found, 1);
      if (at < capacity) {
        tokens[static_cast<std::int64_t>(row) * capacity + at] = {key, i};
      }
    }
  }
}

RuntimeConfig kernels_of(const EchoSelectCase& sizes) {
  RuntimeConfig config;
  config.kernels = sizes.own_kernels != 0 ? "auto" : "generic";
  return config;
}

class SelectCase {
 public:
  explicit SelectCase(const EchoSelectCase& sizes)
      : sizes_(sizes),
        scores_(sizes.scores, sizes.scores + sizes.layers),
        selection_(sizes.selection, sizes.selection + sizes.layers),
        backend_(make_cuda_backend(0, kernels_of(sizes))),
        sift_rows_(backend_->device_memory(), static_cast<std::size_t>(sizes.batch) * sizeof(RowSift), "rows sifted"),
        sift_tokens_(
            backend_->device_memory(),
            static_cast<std::size_t>(sizes.batch) * static_cast<std::size_t>(sizes.capacity) * sizeof(ScoredToken),
            "tokens sifted"),
        counters_(backend_->device_memory(), sizeof(LayerCounters), "counters") {
    backend_->use_stream(reinterpret_cast<std::uintptr_t>(stream_.get()));
    backend_->prepare({.shape = shape(),
                       .layers = sizes.layers,
                       .rows = sizes.batch,
                       .block_rows = sizes.batch,
                       .slots = 64,
                       .host_rows = 64,
                       .splits = 1});
    backend_->fill(counters_.data(), 0, counters_.bytes());
    backend_->synchronize();
    without_.emplace(stream_.get(), [this] { layers(false); });
    with_.emplace(stream_.get(), [this] { layers(true); });
  }
  ~SelectCase() { backend_->retire(); }
  SelectCase(const SelectCase&) = delete;
  SelectCase& operator=(const SelectCase&) = delete;

  int select_nodes() const { return with_->nodes() - without_->nodes(); }

  /// Microseconds of all layers, with select and without.
  void replay(double& with, double& without) {
    without = timed(*without_);
    with = timed(*with_);
  }

  /// Rows whose lists did not do since the last call, all replays together.
  std::int64_t full_selects() {
    LayerCounters counters{};
    backend_->copy_to_host(&counters, counters_.data(), sizeof counters);
    backend_->fill(counters_.data(), 0, counters_.bytes());
    return counters.full_selects;
  }

 private:
  ShapeView shape() const {
    return {.index_heads = 64,
            .index_dim = 128,
            .query_heads = 128,
            .latent_dim = 512,
            .rope_dim = 64,
            .top_k = sizes_.top_k,
            .row_format = RowFormat::raw,
            .index_key_format = IndexKeyFormat::fp8};
  }

  double timed(TimedGraph& graph) {
    begin_.record(stream_.get());
    graph.launch(stream_.get());
    end_.record(stream_.get());
    backend_->synchronize();
    return end_.since(begin_);
  }

  void layers(bool with_select) {
    for (std::int32_t layer = 0; layer < sizes_.layers; ++layer) {
      write(layer);
      if (with_select) {
        select(layer);
      }
    }
  }

  void write(std::int32_t layer) {
    float* scores = scores_[static_cast<std::size_t>(layer)];
    write_scores<<<1056, kThreads, 0, stream_.get()>>>(
        reinterpret_cast<float4*>(scores), static_cast<std::int64_t>(sizes_.batch) * sizes_.score_stride / 4, 1.0F);
    if (sizes_.bounds != nullptr) {
      ECHO_CUDA_CHECK(cudaMemsetAsync(sift_rows_.data(), 0, sift_rows_.bytes(), stream_.get()));
      const dim3 grid(static_cast<unsigned>((1055 + sizes_.batch) / sizes_.batch), static_cast<unsigned>(sizes_.batch));
      list_tokens<<<grid, kThreads, 0, stream_.get()>>>(
          scores, sizes_.score_stride, sizes_.length, sizes_.bounds + static_cast<std::int64_t>(layer) * sizes_.batch,
          sift_rows_.data<RowSift>(), sift_tokens_.data<ScoredToken>(), sizes_.capacity);
    }
    ECHO_CUDA_CHECK(cudaGetLastError());
  }

  void select(std::int32_t layer) {
    SelectParams params{};
    params.step.positions = sizes_.positions;
    params.step.rows = sizes_.batch;
    params.step.query_rows = 1;
    params.step.table_stride = sizes_.score_stride / kTokensPerBlock;
    params.block = {.first = 0, .count = sizes_.batch, .tick_offset = 0};
    params.shape = shape();
    params.scores = scores_[static_cast<std::size_t>(layer)];
    params.score_stride = sizes_.score_stride;
    params.selection = selection_[static_cast<std::size_t>(layer)];
    params.kth_score = sizes_.kth_score;
    params.counters = counters_.data<LayerCounters>();
    if (sizes_.bounds != nullptr) {
      params.sift.rows = sift_rows_.data<RowSift>();
      params.sift.tokens = sift_tokens_.data<ScoredToken>();
      params.sift.capacity = sizes_.capacity;
    }
    backend_->select(params);
  }

  EchoSelectCase sizes_;
  std::vector<float*> scores_;
  std::vector<std::int32_t*> selection_;
  Stream stream_;
  std::unique_ptr<Backend> backend_;
  Buffer sift_rows_;
  Buffer sift_tokens_;
  Buffer counters_;
  TimeEvent begin_;
  TimeEvent end_;
  std::optional<TimedGraph> without_;
  std::optional<TimedGraph> with_;
};

}  // namespace
}  // namespace echo::bench

using echo::bench::SelectCase;

ECHO_SELECT_BENCH_API int echo_select_bench_devices() { return echo::cuda_device_count(); }
ECHO_SELECT_BENCH_API const char* echo_select_bench_error() { return echo::bench::error_text().c_str(); }

/// Sets a case up. Null on failure.
ECHO_SELECT_BENCH_API SelectCase* echo_select_bench_create(const EchoSelectCase* sizes) {
  SelectCase* made = nullptr;
  echo::bench::guarded([&] { made = new SelectCase(*sizes); });
  return made;
}
ECHO_SELECT_BENCH_API void echo_select_bench_destroy(SelectCase* select_case) { delete select_case; }

/// Runs both graphs; microseconds of all layers, with select and without.
ECHO_SELECT_BENCH_API int echo_select_bench_replay(SelectCase* select_case, double* with, double* without) {
  return echo::bench::guarded([&] { select_case->replay(*with, *without); });
}
/// Nodes of the graph that are select's.
ECHO_SELECT_BENCH_API int echo_select_bench_nodes(SelectCase* select_case) { return select_case->select_nodes(); }
/// Rows since the last call whose lists did not do.
ECHO_SELECT_BENCH_API int echo_select_bench_full_selects(SelectCase* select_case, std::int64_t* rows) {
  return echo::bench::guarded([&] { *rows = select_case->full_selects(); });
}
