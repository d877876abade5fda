// The runtime through its public C++ API, and what only its insides can reach.

#include "echo/runtime.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "runtime/runtime_impl.hpp"

namespace echo {

/// Reaches the tick counter, which would take years of steps to overflow.
struct RuntimeTestAccess {
  static void set_tick(RuntimeImpl& impl, std::int32_t tick) { impl.tick_ = tick; }
  static std::int32_t tick(const RuntimeImpl& impl) { return impl.tick_; }
};

namespace {

ModelShape small_shape() {
  ModelShape shape = ModelShape::tiny();
  shape.latent_dim = 32;
  shape.rope_dim = 16;
  shape.query_heads = 4;
  shape.top_k = 8;
  return shape;
}

RuntimeConfig small_config() {
  RuntimeConfig config;
  config.device = "cpu";
  config.host_tokens = 1024;
  config.max_context = 256;
  config.max_batch = 3;
  config.max_sessions = 4;
  config.threads = 2;
  return config;
}

/// A model whose arrays are tables of random numbers by token and position.
class TableModel {
 public:
  explicit TableModel(const ModelShape& shape) : shape_(shape), table_(1 << 16) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& value : table_) {
      value = normal(random);
    }
  }

  void operator()(ForwardPass& pass) {
    const std::int64_t rows = pass.rows();
    output.assign(static_cast<std::size_t>(shape_.layers * rows * shape_.query_heads * shape_.latent_dim), NAN);
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
      LayerInputs in;
      std::vector<float> kv = rows_of(pass, layer, 0, shape_.row_dim());
      std::vector<float> key = rows_of(pass, layer, 1, shape_.index_dim);
      std::vector<float> index_q = rows_of(pass, layer, 2, shape_.index_heads * shape_.index_dim);
      std::vector<float> weights = rows_of(pass, layer, 3, shape_.index_heads);
      std::vector<float> q = rows_of(pass, layer, 4, shape_.query_heads * shape_.row_dim());
      in.kv = Array(kv.data(), DType::f32, {rows, shape_.row_dim()});
      in.index_key = Array(key.data(), DType::f32, {rows, shape_.index_dim});
      in.index_q = Array(index_q.data(), DType::f32, {rows, shape_.index_heads, shape_.index_dim});
      in.index_weights = Array(weights.data(), DType::f32, {rows, shape_.index_heads});
      in.q = Array(q.data(), DType::f32, {rows, shape_.query_heads, shape_.row_dim()});
      in.scale = 0.1F;
      float* out = output.data() + layer * rows * shape_.query_heads * shape_.latent_dim;
      pass.attention(layer, in, Array(out, DType::f32, {rows, shape_.query_heads, shape_.latent_dim}));
    }
  }

  std::vector<float> output;

 private:
  std::vector<float> rows_of(const ForwardPass& pass, std::int32_t layer, int kind, std::int64_t width) const {
    const auto* tokens = pass.tokens().as<const std::int32_t>();
    const auto* positions = pass.positions().as<const std::int32_t>();
    std::vector<float> values;
    for (std::int32_t row = 0; row < pass.rows(); ++row) {
      const std::size_t seed = static_cast<std::size_t>(tokens[row]) * 7919 +
                               static_cast<std::size_t>(positions[row] + 1) * 104729 +
                               static_cast<std::size_t>(layer) * 1299709 + static_cast<std::size_t>(kind) * 15485863;
      for (std::int64_t i = 0; i < width; ++i) {
        values.push_back(table_[(seed + static_cast<std::size_t>(i)) % table_.size()]);
      }
    }
    return values;
  }

  ModelShape shape_;
  std::vector<float> table_;
};

std::vector<std::int32_t> some_tokens(int count) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 3);
  return tokens;
}

std::vector<float> decode(Runtime& runtime, TableModel& model, int steps) {
  const Session a = runtime.open_session(200);
  const Session b = runtime.open_session(200);
  const std::vector<std::int32_t> prompt = some_tokens(100);
  runtime.prefill(a, prompt, std::ref(model));
  runtime.prefill(b, std::span(prompt).first(50), std::ref(model));
  std::vector<float> outputs;
  for (int step = 0; step < steps; ++step) {
    Batch batch;
    batch.add(a, step);
    batch.add(b, step + 1);
    runtime.step(batch, std::ref(model));
    outputs.insert(outputs.end(), model.output.begin(), model.output.end());
  }
  return outputs;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Runtime, DecodesTheSameBitsWithASmallPool) {
  TableModel model(small_shape());
  RuntimeConfig config = small_config();
  Runtime small(small_shape(), config);
  config.gpu_slots = 1024;
  Runtime large(small_shape(), config);
  const std::vector<float> expected = decode(large, model, 20);
  EXPECT_TRUE(same_bits(decode(small, model, 20), expected));
  EXPECT_GT(small.stats().recalled_bytes(), large.stats().recalled_bytes());
  for (const float value : expected) {
    ASSERT_TRUE(std::isfinite(value));
  }
}

TEST(Runtime, TicksStartOverWithoutAChangeOfBits) {
  TableModel model(small_shape());
  Runtime reference(small_shape(), small_config());
  const std::vector<float> expected = decode(reference, model, 20);

  const auto impl = std::make_shared<RuntimeImpl>(small_shape(), small_config());
  const Session a = impl->open_session(200);
  const Session b = impl->open_session(200);
  const std::vector<std::int32_t> prompt = some_tokens(100);
  RuntimeTestAccess::set_tick(*impl, std::numeric_limits<std::int32_t>::max() - 12);
  impl->prefill(a, prompt, std::ref(model));
  impl->prefill(b, std::span(prompt).first(50), std::ref(model));
  std::vector<float> outputs;
  for (int step = 0; step < 20; ++step) {
    Batch batch;
    batch.add(a, step);
    batch.add(b, step + 1);
    impl->step(batch, std::ref(model));
    outputs.insert(outputs.end(), model.output.begin(), model.output.end());
  }
  EXPECT_LT(RuntimeTestAccess::tick(*impl), 100);
  EXPECT_TRUE(same_bits(outputs, expected));
}

TEST(Runtime, RefusesWhatDoesNotFitTheMachineWithATable) {
  RuntimeConfig config = small_config();
  config.host_tokens = std::int64_t{1} << 30;
  try {
    Runtime runtime(ModelShape::deepseek_v32(), config);
    FAIL() << "it was constructed";
  } catch (const CapacityError& error) {
    EXPECT_NE(std::string(error.what()).find("host_pool"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("DOES NOT FIT"), std::string::npos) << error.what();
  }
}

TEST(Runtime, AForwardThatThrowsLeavesNothingBehind) {
  TableModel model(small_shape());
  Runtime runtime(small_shape(), small_config());
  Runtime reference(small_shape(), small_config());
  const std::vector<float> expected = decode(reference, model, 3);
  const Session a = runtime.open_session(200);
  const std::vector<std::int32_t> prompt = some_tokens(100);
  EXPECT_THROW(runtime.prefill(a, prompt,
                               [&](ForwardPass& pass) {
                                 model(pass);
                                 throw std::runtime_error("after all layers");
                               }),
               std::runtime_error);
  EXPECT_EQ(a.length(), 0);
  Session copy = a;
  copy.close();
  EXPECT_TRUE(same_bits(decode(runtime, model, 3), expected));
}

TEST(Runtime, AForwardThatSkipsALayerIsRefused) {
  Runtime runtime(small_shape(), small_config());
  const Session session = runtime.open_session(10);
  const std::int32_t token = 1;
  EXPECT_THROW(runtime.prefill(session, {&token, 1}, [](ForwardPass&) {}), StateError);
  EXPECT_EQ(session.length(), 0);
}

TEST(Runtime, SessionsOutliveTheirRuntimeAsClosedHandles) {
  Session session;
  {
    Runtime runtime(small_shape(), small_config());
    session = runtime.open_session(10);
    runtime.close();
    EXPECT_TRUE(session.closed());
    EXPECT_THROW(runtime.open_session(10), StateError);
    runtime.close();
  }
  session.close();
  EXPECT_TRUE(session.closed());
}

}  // namespace
}  // namespace echo
