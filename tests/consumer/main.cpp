// A small serving loop in C++ against the installed library: three sessions are prefilled and
// decoded as one batch, by a model that exists only here. It runs once with a pool that holds every
// row and once with the smallest pool the runtime accepts, captured and padded at that. The outputs
// must have the same bits. Exits non-zero if anything is not as promised.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "echo/runtime.hpp"

namespace {

constexpr std::int32_t kVocabulary = 97;
constexpr std::int32_t kHidden = 32;
constexpr std::int32_t kSteps = 40;
constexpr std::int64_t kMaxTokens = 512;
const std::vector<std::int32_t> kPrompts = {420, 250, 97};

void require(bool condition, const std::string& what) {
  if (!condition) {
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
  }
}

// y[rows, out] = x[rows, in] . w[in, out]
std::vector<float> multiply(const std::vector<float>& x, const std::vector<float>& w, std::size_t in) {
  const std::size_t rows = x.size() / in;
  const std::size_t out = w.size() / in;
  std::vector<float> y(rows * out, 0.0F);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t i = 0; i < in; ++i) {
      for (std::size_t o = 0; o < out; ++o) {
        y[r * out + o] += x[r * in + i] * w[i * out + o];
      }
    }
  }
  return y;
}

// Random embeddings and projections; each layer adds what it attended to, so that a wrong bit in
// one layer shows in all later ones.
class RandomModel {
 public:
  explicit RandomModel(const echo::ModelShape& shape) : shape_(shape) {
    const std::int32_t row = shape.row_dim();
    embedding_ = random(kVocabulary, kHidden, 1.0F);
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
      layers_.push_back({random(kHidden, row, kScale), random(kHidden, shape.index_dim, kScale),
                         random(kHidden, shape.index_heads * shape.index_dim, kScale),
                         random(kHidden, shape.index_heads, kScale), random(kHidden, shape.query_heads * row, kScale),
                         random(shape.query_heads * shape.latent_dim, kHidden, 0.05F)});
    }
  }

  // On the CPU a captured forward is simply called again, so it may use the heap. One that is
  // captured for a GPU must work in buffers that stay.
  void operator()(echo::ForwardPass& pass) {
    const std::int64_t rows = pass.rows();
    const std::int64_t row = shape_.row_dim();
    const auto* tokens = pass.tokens().as<std::int32_t>();
    const auto* positions = pass.positions().as<std::int32_t>();
    hidden_.resize(static_cast<std::size_t>(rows * kHidden));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < kHidden; ++i) {
        const float wave = std::sin(0.1F * static_cast<float>(positions[r] * (i + 1)));
        hidden_[at(r * kHidden + i)] = embedding_[at(tokens[r] * kHidden + i)] + wave;
      }
    }
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
      const Layer& w = layers_[at(layer)];
      const auto kv = multiply(hidden_, w.kv, kHidden);
      const auto index_key = multiply(hidden_, w.index_key, kHidden);
      const auto index_q = multiply(hidden_, w.index_q, kHidden);
      const auto index_weights = multiply(hidden_, w.index_weights, kHidden);
      const auto q = multiply(hidden_, w.q, kHidden);
      std::vector<float> out(at(rows * shape_.query_heads * shape_.latent_dim), NAN);

      using echo::DType;
      echo::LayerInputs in;
      in.kv = {kv.data(), DType::f32, {rows, row}};
      in.index_key = {index_key.data(), DType::f32, {rows, shape_.index_dim}};
      in.index_q = {index_q.data(), DType::f32, {rows, shape_.index_heads, shape_.index_dim}};
      in.index_weights = {index_weights.data(), DType::f32, {rows, shape_.index_heads}};
      in.q = {q.data(), DType::f32, {rows, shape_.query_heads, row}};
      in.scale = 1.0F / std::sqrt(static_cast<float>(row));
      pass.attention(layer, in, {out.data(), DType::f32, {rows, shape_.query_heads, shape_.latent_dim}});

      const auto added = multiply(out, w.out, at(shape_.query_heads * shape_.latent_dim));
      std::transform(hidden_.begin(), hidden_.end(), added.begin(), hidden_.begin(), std::plus<>());
    }
  }

  // Hidden state of a row of the last pass.
  std::vector<float> hidden(std::int64_t row) const {
    const auto first = hidden_.begin() + row * kHidden;
    return {first, first + kHidden};
  }

  std::int32_t next_token(std::int64_t row) const {
    const std::vector<float> state = hidden(row);
    std::int32_t best = 0;
    float best_logit = -INFINITY;
    for (std::int32_t token = 0; token < kVocabulary; ++token) {
      float logit = 0.0F;
      for (std::int64_t i = 0; i < kHidden; ++i) {
        logit += state[at(i)] * embedding_[at(token * kHidden + i)];
      }
      if (logit > best_logit) {
        best = token;
        best_logit = logit;
      }
    }
    return best;
  }

 private:
  static constexpr float kScale = 0.2F;
  struct Layer {
    std::vector<float> kv, index_key, index_q, index_weights, q, out;
  };

  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

  std::vector<float> random(std::int64_t rows, std::int64_t columns, float deviation) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<float> values(at(rows * columns));
    std::generate(values.begin(), values.end(), [&] { return normal(generator_); });
    return values;
  }

  echo::ModelShape shape_;
  std::mt19937 generator_{7};
  std::vector<float> embedding_;
  std::vector<Layer> layers_;
  std::vector<float> hidden_;
};

struct Result {
  std::vector<std::vector<float>> hidden;  // of every decoded row, in order
  std::vector<std::int32_t> tokens;
  echo::RuntimeStats stats;
  std::int64_t slots = 0;
};

Result serve(const echo::ModelShape& shape, const echo::RuntimeConfig& config, bool captured) {
  echo::Runtime runtime(shape, config);
  require(runtime.device() == "cpu", "the runtime is on the CPU");
  RandomModel model(shape);
  const echo::Forward forward = [&model](echo::ForwardPass& pass) { model(pass); };
  Result result;
  result.slots = config.gpu_slots;

  std::mt19937 generator(11);
  echo::Batch batch;
  for (const std::int32_t length : kPrompts) {
    std::vector<std::int32_t> prompt(static_cast<std::size_t>(length));
    for (std::int32_t& token : prompt) {
      token = static_cast<std::int32_t>(generator() % kVocabulary);
    }
    const echo::Session session = runtime.open_session(kMaxTokens);
    runtime.prefill(session, prompt, forward);
    require(session.length() == length, "a session holds its prompt");
    batch.add(session, model.next_token(length - 1));
  }

  if (captured) {  // batches of three run as four rows, one of them padding
    runtime.capture(forward, {4});
  }
  for (std::int32_t step = 0; step < kSteps; ++step) {
    captured ? runtime.step(batch) : runtime.step(batch, forward);
    for (std::size_t i = 0; i < batch.sessions.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i);
      result.hidden.push_back(model.hidden(row));
      batch.tokens[i] = model.next_token(row);
      result.tokens.push_back(batch.tokens[i]);
    }
  }
  result.stats = runtime.stats();

  // A refusal crosses the library's border as the type it is, and changes nothing.
  bool refused = false;
  try {
    runtime.open_session(config.host_tokens + 1);
  } catch (const echo::Error& error) {
    refused = *error.what() != '\0';
  }
  require(refused, "a session larger than the host pool is refused with echo::Error");
  require(batch.sessions[0].length() == kPrompts[0] + kSteps, "sessions have grown by one token a step");
  runtime.close();
  return result;
}

void print(const char* name, const Result& result) {
  std::int64_t misses = 0;
  for (const echo::LayerStats& layer : result.stats.layers) {
    misses += layer.misses;
  }
  std::printf("%-22s %8lld %9.1f%% %10lld %12.2f\n", name, static_cast<long long>(result.slots),
              100.0 * result.stats.hit_rate(), static_cast<long long>(misses),
              static_cast<double>(result.stats.recalled_bytes()) / 1e6);
}

int run() {
  std::printf("%s\n", echo::build_info().c_str());
  const echo::ModelShape shape = echo::ModelShape::tiny();
  echo::RuntimeConfig config;
  config.device = "cpu";
  config.host_tokens = 4 * kMaxTokens;
  config.max_context = kMaxTokens;
  config.max_batch = 4;

  config.gpu_slots = config.host_tokens;
  const Result full = serve(shape, config, false);
  config.gpu_slots = echo::make_plan(shape, config).minimum_slots;
  const Result small = serve(shape, config, true);

  std::printf("%-22s %8s %10s %10s %12s\n", "pool", "slots", "hit rate", "misses", "recalled MB");
  print("all rows, eager", full);
  print("minimum, captured", small);

  bool same_bits = full.hidden.size() == small.hidden.size();
  for (std::size_t i = 0; same_bits && i < full.hidden.size(); ++i) {
    for (const float value : full.hidden[i]) {
      require(std::isfinite(value), "outputs are finite");
    }
    // Finite floats are the same bits where they are equal, except for the two zeros.
    same_bits = std::equal(full.hidden[i].begin(), full.hidden[i].end(), small.hidden[i].begin(),
                           [](float a, float b) { return a == b && std::signbit(a) == std::signbit(b); });
  }
  require(same_bits, "outputs have the same bits with both pools");
  require(full.tokens == small.tokens, "both pools lead to the same tokens");
  require(small.stats.recalled_bytes() > full.stats.recalled_bytes(), "the small pool recalls more");
  std::printf("%zu decoded rows, same bits with both pools: ok\n", full.hidden.size());
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
  }
}
