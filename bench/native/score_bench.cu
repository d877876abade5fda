// Times score: a CUDA graph of `layers` calls of the backend's verb, each with index keys of its own, so many that no
// layer's keys are still in the L2 cache when its turn comes again. A C API for ctypes: functions return 0, or -1 and
// echo_score_bench_error() says why.
//
// Keys are random codes without NaN, written by a kernel; queries are bf16, as models have them; block tables are
// random permutations of the cache. Verification compares scores of the last layer with sums in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "echo/runtime_config.hpp"
#include "guarded.hpp"
#include "kernels/cuda_check.hpp"
#include "kernels/cuda_handles.hpp"
#include "kernels/number_formats.hpp"
#include "runtime/backend.hpp"
#include "runtime/backends.hpp"
#include "timed_graph.hpp"

#define ECHO_SCORE_BENCH_API extern "C" __attribute__((visibility("default")))

extern "C" struct EchoScoreCase {
  std::int32_t batch;
  std::int32_t query_rows;  ///< of each session
  std::int32_t length;      ///< tokens of the longest session
  std::int32_t ragged;      ///< 1: lengths fall evenly from `length` to a tenth of it
  std::int32_t heads;
  std::int32_t layers;
};

namespace echo::bench {
namespace {

constexpr std::int32_t kDim = 128;
constexpr std::int64_t kBlockBytes = kTokensPerBlock * (kDim + 4);

/// Random bits of a counter.
__device__ std::uint32_t mixed(std::uint64_t counter) {
  std::uint64_t x = counter * 0x9E3779B97F4A7C15ULL + 0x1234567ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(x >> 32);
}

/// Random e4m3 codes of magnitudes below 32, and scales of 2^-9 to 2^-6.
__global__ void fill_keys(std::uint32_t* words, std::int64_t count, std::uint64_t seed) {
  constexpr std::int64_t kBlockWords = kBlockBytes / 4;
  constexpr std::int64_t kKeyWords = kTokensPerBlock * kDim / 4;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const std::uint32_t random = mixed(seed + static_cast<std::uint64_t>(i));
    words[i] = i % kBlockWords < kKeyWords ? random & 0xDFDFDFDFU : (118U + random % 4U) << 23;
  }
}

template <typename T>
Buffer uploaded(Backend& backend, const std::vector<T>& values, const char* name) {
  Buffer buffer(backend.device_memory(), values.size() * sizeof(T), name);
  backend.copy_to_device(buffer.data(), values.data(), buffer.bytes());
  return buffer;
}

RuntimeConfig own_kernels() {
  RuntimeConfig config;
  config.kernels = "auto";
  return config;
}

class ScoreCase {
 public:
  explicit ScoreCase(const EchoScoreCase& sizes)
      : sizes_(sizes),
        rows_(sizes.batch * sizes.query_rows),
        table_stride_((sizes.length + kTokensPerBlock - 1) / kTokensPerBlock),
        blocks_(sizes.batch * table_stride_),
        backend_(make_cuda_backend(0, own_kernels())) {
    backend_->use_stream(reinterpret_cast<std::uintptr_t>(stream_.get()));
    backend_->prepare({.shape = shape(),
                       .layers = sizes.layers,
                       .rows = rows_,
                       .block_rows = rows_,
                       .slots = 64,
                       .host_rows = static_cast<std::int64_t>(blocks_) * kTokensPerBlock,
                       .splits = 1});
    make_inputs();
    for (std::int32_t layer = 0; layer < sizes.layers; ++layer) {
      const Buffer& own =
          keys_.emplace_back(backend_->device_memory(), static_cast<std::size_t>(blocks_ * kBlockBytes), "index keys");
      fill_keys<<<1024, 256, 0, stream_.get()>>>(own.data<std::uint32_t>(), blocks_ * kBlockBytes / 4,
                                                 static_cast<std::uint64_t>(layer) << 40);
    }
    ECHO_CUDA_CHECK(cudaGetLastError());
    backend_->synchronize();
    graph_.emplace(stream_.get(), [this] { score_layers(); });
  }
  ~ScoreCase() { backend_->retire(); }
  ScoreCase(const ScoreCase&) = delete;
  ScoreCase& operator=(const ScoreCase&) = delete;

  int nodes() const { return graph_->nodes(); }

  /// Microseconds of all layers.
  double replay() {
    begin_.record(stream_.get());
    graph_->launch(stream_.get());
    end_.record(stream_.get());
    backend_->synchronize();
    return end_.since(begin_);
  }

  /// Throws where a score of the last layer is off by more than FP8 tensor cores round.
  void verify() const;

 private:
  ShapeView shape() const {
    return {.index_heads = sizes_.heads,
            .index_dim = kDim,
            .query_heads = 128,
            .latent_dim = 512,
            .rope_dim = 64,
            .top_k = 1,
            .row_format = RowFormat::raw,
            .index_key_format = IndexKeyFormat::fp8};
  }
  std::int64_t score_stride() const { return static_cast<std::int64_t>(table_stride_) * kTokensPerBlock; }

  void make_inputs();
  void score_layers();

  EchoScoreCase sizes_;
  std::int32_t rows_;
  std::int32_t table_stride_;
  std::int64_t blocks_;
  Stream stream_;
  std::unique_ptr<Backend> backend_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int32_t> table_;
  std::vector<std::uint16_t> queries_;
  std::vector<float> weights_;
  std::optional<Buffer> device_positions_;
  std::optional<Buffer> device_table_;
  std::optional<Buffer> device_queries_;
  std::optional<Buffer> device_weights_;
  std::optional<Buffer> scores_;
  std::vector<Buffer> keys_;
  TimeEvent begin_;
  TimeEvent end_;
  std::optional<TimedGraph> graph_;
};

void ScoreCase::make_inputs() {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  for (std::int32_t row = 0; row < rows_; ++row) {
    const std::int32_t entry = row / sizes_.query_rows;
    const double share = sizes_.ragged == 0 || sizes_.batch == 1 ? 1.0 : 1.0 - 0.9 * entry / (sizes_.batch - 1);
    const auto length = std::max(static_cast<std::int32_t>(share * sizes_.length), sizes_.query_rows);
    positions_.push_back(length - sizes_.query_rows + row % sizes_.query_rows);
  }
  table_.resize(static_cast<std::size_t>(blocks_));
  std::iota(table_.begin(), table_.end(), 0);
  std::shuffle(table_.begin(), table_.end(), engine);
  weights_.resize(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(sizes_.heads));
  queries_.resize(weights_.size() * kDim);
  std::generate(weights_.begin(), weights_.end(), [&] { return normal(engine); });
  std::generate(queries_.begin(), queries_.end(), [&] { return to_bf16(normal(engine)); });
  device_positions_.emplace(uploaded(*backend_, positions_, "positions"));
  device_table_.emplace(uploaded(*backend_, table_, "block table"));
  device_queries_.emplace(uploaded(*backend_, queries_, "queries"));
  device_weights_.emplace(uploaded(*backend_, weights_, "weights"));
  scores_.emplace(backend_->device_memory(), static_cast<std::size_t>(rows_ * score_stride()) * sizeof(float),
                  "scores");
}

void ScoreCase::score_layers() {
  for (const Buffer& keys : keys_) {
    LayerView layer{};
    layer.slots = 64;
    layer.index_keys = keys.data();
    layer.host_rows = blocks_ * kTokensPerBlock;
    layer.index_block_bytes = kBlockBytes;
    backend_->score({.layer = layer,
                     .step = {.tick = nullptr,
                              .tokens = nullptr,
                              .positions = device_positions_->data<std::int32_t>(),
                              .session = nullptr,
                              .block_table = device_table_->data<std::int32_t>(),
                              .rows = rows_,
                              .query_rows = sizes_.query_rows,
                              .table_stride = table_stride_,
                              .owners = nullptr},
                     .block = {.first = 0, .count = rows_, .tick_offset = 0},
                     .shape = shape(),
                     .index_q = device_queries_->data(),
                     .index_q_dtype = DType::bf16,
                     .index_weights = device_weights_->data<float>(),
                     .scores = scores_->data<float>(),
                     .score_stride = score_stride()});
  }
}

void ScoreCase::verify() const {
  std::mt19937 engine(2);
  const auto heads = static_cast<std::size_t>(sizes_.heads);
  std::vector<std::byte> block(kBlockBytes);
  for (int sample = 0; sample < 256; ++sample) {
    const auto row = engine() % static_cast<std::uint32_t>(rows_);
    const auto length = static_cast<std::uint32_t>(positions_[row]) + 1U;
    const std::uint32_t token = sample % 4 == 0 ? length - 1U : engine() % length;
    const std::size_t entry = row / static_cast<std::uint32_t>(sizes_.query_rows);
    const std::int64_t host =
        table_[entry * static_cast<std::size_t>(table_stride_) + token / static_cast<std::uint32_t>(kTokensPerBlock)];
    backend_->copy_to_host(block.data(), keys_.back().data() + host * kBlockBytes, block.size());
    const std::byte* key = block.data() + token % 64 * kDim;
    float scale = 0.0F;
    std::memcpy(&scale, block.data() + 64 * kDim + token % 64 * sizeof scale, sizeof scale);
    double sum = 0.0;
    double size = 0.0;
    for (std::size_t head = 0; head < heads; ++head) {
      std::vector<float> query(kDim);
      std::transform(queries_.begin() + static_cast<std::ptrdiff_t>((row * heads + head) * kDim),
                     queries_.begin() + static_cast<std::ptrdiff_t>((row * heads + head + 1) * kDim), query.begin(),
                     from_bf16);
      const float unit = power_of_two_scale(std::accumulate(query.begin(), query.end(), 0.0F, amax_with));
      double dot = 0.0;
      double magnitude = 0.0;
      for (std::size_t d = 0; d < kDim; ++d) {
        const double product = static_cast<double>(from_e4m3(to_e4m3(query[d] / unit))) * unit *
                               from_e4m3(static_cast<std::uint8_t>(key[d]));
        dot += product;
        magnitude += std::abs(product);
      }
      sum += weights_[row * heads + head] * std::max(dot, 0.0);
      size += std::abs(weights_[row * heads + head]) * magnitude;
    }
    float got = 0.0F;
    backend_->copy_to_host(&got, scores_->data<float>() + row * score_stride() + token, sizeof got);
    if (!(std::abs(got - sum * scale) <= std::ldexp(size * scale, -10))) {
      throw std::runtime_error("score of row " + std::to_string(row) + ", token " + std::to_string(token) + ": " +
                               std::to_string(got) + ", expected " + std::to_string(sum * scale));
    }
  }
}

}  // namespace
}  // namespace echo::bench

using echo::bench::ScoreCase;

ECHO_SCORE_BENCH_API int echo_score_bench_devices() { return echo::cuda_device_count(); }
ECHO_SCORE_BENCH_API const char* echo_score_bench_error() { return echo::bench::error_text().c_str(); }

/// Sets a case up. Null on failure.
ECHO_SCORE_BENCH_API ScoreCase* echo_score_bench_create(const EchoScoreCase* sizes) {
  ScoreCase* made = nullptr;
  echo::bench::guarded([&] { made = new ScoreCase(*sizes); });
  return made;
}
ECHO_SCORE_BENCH_API void echo_score_bench_destroy(ScoreCase* score_case) { delete score_case; }

/// Runs the graph; microseconds of all its layers.
ECHO_SCORE_BENCH_API int echo_score_bench_replay(ScoreCase* score_case, double* microseconds) {
  return echo::bench::guarded([&] { *microseconds = score_case->replay(); });
}
ECHO_SCORE_BENCH_API int echo_score_bench_nodes(ScoreCase* score_case) { return score_case->nodes(); }
/// After a replay: are the scores right?
ECHO_SCORE_BENCH_API int echo_score_bench_verify(ScoreCase* score_case) {
  return echo::bench::guarded([&] { score_case->verify(); });
}
