#pragma once
// A small runtime and a model for it, without Python; and the runtime's insides.

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "runtime/runtime_impl.hpp"

namespace echo {

struct RuntimeTestAccess {
  /// The tick counter would take years of steps to overflow.
  static void set_tick(RuntimeImpl& impl, std::int32_t tick) { impl.tick_ = tick; }
  static std::int32_t tick(const RuntimeImpl& impl) { return impl.tick_; }
  static const std::shared_ptr<Backend>& backend(const RuntimeImpl& impl) { return impl.backend_; }
  /// What passes call from now on.
  static void use_backend(RuntimeImpl& impl, std::shared_ptr<Backend> backend) { impl.backend_ = std::move(backend); }
};

namespace runtime_test {

inline ModelShape small_shape() {
  ModelShape shape = ModelShape::tiny();
  shape.latent_dim = 32;
  shape.rope_dim = 16;
  shape.query_heads = 4;
  shape.top_k = 8;
  return shape;
}

inline RuntimeConfig small_config() {
  RuntimeConfig config;
  config.device = "cpu";
  config.host_tokens = 1024;
  config.max_context = 256;
  config.max_batch = 3;
  config.max_sessions = 4;
  config.threads = 2;
  return config;
}

/// What a model computes for a layer, with its memory.
struct LayerArrays {
  std::vector<float> kv;
  std::vector<float> index_key;
  std::vector<float> index_q;
  std::vector<float> index_weights;
  std::vector<float> q;
  LayerInputs in;
};

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
    begin(pass);
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
      const auto arrays = inputs(pass, layer);
      pass.attention(layer, arrays->in, out(pass, layer));
    }
  }

  /// Room for the outputs of all layers.
  void begin(const ForwardPass& pass) {
    output.assign(static_cast<std::size_t>(shape_.layers * output_of_layer(pass)), NAN);
  }
  Array out(const ForwardPass& pass, std::int32_t layer) {
    return {output.data() + layer * output_of_layer(pass),
            DType::f32,
            {pass.rows(), shape_.query_heads, shape_.latent_dim}};
  }
  std::unique_ptr<LayerArrays> inputs(const ForwardPass& pass, std::int32_t layer) const {
    const std::int64_t rows = pass.rows();
    auto arrays = std::make_unique<LayerArrays>();
    arrays->kv = rows_of(pass, layer, 0, shape_.row_dim());
    arrays->index_key = rows_of(pass, layer, 1, shape_.index_dim);
    arrays->index_q = rows_of(pass, layer, 2, shape_.index_heads * shape_.index_dim);
    arrays->index_weights = rows_of(pass, layer, 3, shape_.index_heads);
    arrays->q = rows_of(pass, layer, 4, shape_.query_heads * shape_.row_dim());
    arrays->in.kv = Array(arrays->kv.data(), DType::f32, {rows, shape_.row_dim()});
    arrays->in.index_key = Array(arrays->index_key.data(), DType::f32, {rows, shape_.index_dim});
    arrays->in.index_q = Array(arrays->index_q.data(), DType::f32, {rows, shape_.index_heads, shape_.index_dim});
    arrays->in.index_weights = Array(arrays->index_weights.data(), DType::f32, {rows, shape_.index_heads});
    arrays->in.q = Array(arrays->q.data(), DType::f32, {rows, shape_.query_heads, shape_.row_dim()});
    arrays->in.scale = 0.1F;
    return arrays;
  }

  std::vector<float> output;

 private:
  std::int64_t output_of_layer(const ForwardPass& pass) const {
    return static_cast<std::int64_t>(pass.rows()) * shape_.query_heads * shape_.latent_dim;
  }
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

inline std::vector<std::int32_t> some_tokens(int count) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 3);
  return tokens;
}

}  // namespace runtime_test
}  // namespace echo
