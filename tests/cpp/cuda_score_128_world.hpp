#pragma once
// Keys and queries of 128 dimensions for tests of score: small integers, which every kernel adds up exactly, and
// what the sums of other numbers may be off by.

#include <ranges>
#include <string>

#include "cuda_score_world.hpp"
#include "echo/device_report.hpp"
#include "echo/runtime.hpp"
#include "kernels/number_formats.hpp"

namespace echo::cuda_test {

inline constexpr std::int32_t kDim = 128;

inline ShapeView shape_128(std::int32_t heads) {
  ShapeView shape = shape_of(RowFormat::fp32);
  shape.index_heads = heads;
  shape.index_dim = kDim;
  return shape;
}

/// Whether there is one for this device in this build.
inline bool can_score_128() {
  return device_report().compute_capability == 90 && build_info().find("90a") != std::string::npos;
}

struct Pair128 : Pair {
  Pair128(std::int32_t heads, const Sizes& sizes) : Pair(shape_128(heads), sizes, own_kernels()) {}
};

inline std::vector<float> filled(std::size_t count, float value) { return std::vector<float>(count, value); }

inline Inputs zero_inputs(const World& world) {
  const auto queries = static_cast<std::size_t>(world.sizes.rows() * world.shape.index_heads);
  return {filled(queries * kDim, 0.0F), filled(queries, 0.0F)};
}

/// Queries of -2 to 2 and weights of -4 to 4; the fourth row's queries are zero.
inline Inputs integer_inputs(const World& world, unsigned seed) {
  Inputs inputs = zero_inputs(world);
  std::mt19937 engine(seed);
  const auto row = static_cast<std::size_t>(world.shape.index_heads) * kDim;
  for (std::size_t i = 0; i < inputs.queries.size(); ++i) {
    inputs.queries[i] = i / row == 3 ? 0.0F : static_cast<float>(engine() % 5U) - 2.0F;
  }
  std::ranges::generate(inputs.weights, [&] { return static_cast<float>(engine() % 9U) - 4.0F; });
  return inputs;
}

/// New keys of -3 to 3, with a 7 in each so that all have the same scale, which keeps scores whole numbers.
inline std::vector<float> integer_keys(const World& world, unsigned seed) {
  std::vector<float> keys(static_cast<std::size_t>(world.sizes.rows()) * kDim);
  std::mt19937 engine(seed);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = i % kDim == 5 ? 7.0F : static_cast<float>(engine() % 7U) - 3.0F;
  }
  return keys;
}

inline Inputs rounded_to_bf16(Inputs inputs) {
  for (float& value : inputs.queries) {
    value = from_bf16(to_bf16(value));
  }
  return inputs;
}

/// Keys in all blocks of both worlds: value(block, token, dimension) and scale(token).
template <typename Value, typename Scale>
void set_keys(auto& pair, Value value, Scale scale) {
  std::vector<std::byte> keys(pair.cpu.index_keys.size());
  const auto block_bytes = static_cast<std::size_t>(pair.cpu.index_block_bytes());
  for (std::size_t block = 0; block < keys.size() / block_bytes; ++block) {
    std::byte* out = keys.data() + block * block_bytes;
    for (int token = 0; token < kTokensPerBlock; ++token) {
      for (int d = 0; d < kDim; ++d) {
        out[token * kDim + d] = static_cast<std::byte>(to_e4m3(value(static_cast<int>(block), token, d)));
      }
      const float own_scale = scale(token);
      std::memcpy(out + kTokensPerBlock * kDim + token * 4, &own_scale, sizeof own_scale);
    }
  }
  pair.cpu.index_keys.write(keys);
  pair.gpu.index_keys.write(keys);
}
template <typename Value>
void set_keys(auto& pair, Value value) {
  set_keys(pair, value, [](int) { return 1.0F; });
}

/// Keys of -3 to 3, scales of 1/8 to 8.
void set_integer_keys(auto& pair, unsigned seed) {
  std::mt19937 engine(seed);
  set_keys(
      pair, [&](int, int, int) { return static_cast<float>(engine() % 7U) - 3.0F; },
      [&](int) { return std::ldexp(1.0F, static_cast<int>(engine() % 7U) - 3); });
}

/// Scores a block on the GPU (unless that has been done) and on the CPU: the same numbers, nothing behind them.
inline void expect_equal_scores(Pair& pair, const Inputs& inputs, const std::vector<std::int32_t>& positions,
                                BlockView block, bool on_gpu = true) {
  const auto score_on = [&](World& world) {
    world.begin(1, positions);
    world.scores.write(filled(world.scores.size(), std::numeric_limits<float>::infinity()));
    score(world, inputs, block);
  };
  score_on(pair.cpu);
  if (on_gpu) {
    score_on(pair.gpu);
  }
  const auto expected = pair.cpu.scores.read();
  const auto got = pair.gpu.scores.read();
  const auto stride = static_cast<std::size_t>(pair.cpu.sizes.score_stride());
  int wrong = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool same = got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]));
    if (!same && ++wrong <= 5) {
      const auto row = static_cast<std::size_t>(block.first) + i / stride;
      ADD_FAILURE() << "row " << row << " at position " << positions[row] << ", token " << i % stride << ": " << got[i]
                    << ", expected " << expected[i] << "; " << pair.cpu.shape.index_heads << " heads, "
                    << pair.cpu.sizes.query_rows << " rows of a session, rows " << block.first << " + " << block.count;
    }
  }
  ASSERT_EQ(wrong, 0) << "of " << expected.size();
}

inline std::vector<float> decoded(const std::byte* codes, std::size_t count) {
  std::vector<float> values(count);
  std::transform(codes, codes + count, values.begin(),
                 [](std::byte code) { return from_e4m3(static_cast<std::uint8_t>(code)); });
  return values;
}

/// Compares scores with sums in double. Tensor cores align the products of 32 dimensions and keep some 13 bits of the
/// largest.
inline void expect_within_rounding(const World& gpu, const Inputs& inputs, const std::vector<std::int32_t>& positions) {
  const auto heads = static_cast<std::size_t>(gpu.shape.index_heads);
  const auto keys = gpu.index_keys.read();
  const auto scores = gpu.scores.read();
  double worst = 0.0;
  for (std::size_t row = 0; row < positions.size(); ++row) {
    for (std::size_t token = 0; static_cast<std::int32_t>(token) <= positions[row]; ++token) {
      const std::size_t number = 2 * (row * static_cast<std::size_t>(gpu.sizes.table_stride) + token / 64) + 1;
      const std::byte* block = keys.data() + number * static_cast<std::size_t>(gpu.index_block_bytes());
      const auto key = decoded(block + token % 64 * kDim, kDim);
      float scale = 0.0F;
      std::memcpy(&scale, block + 64 * kDim + token % 64 * sizeof scale, sizeof scale);
      double sum = 0.0;
      double size = 0.0;
      for (std::size_t head = 0; head < heads; ++head) {
        const float* query = inputs.queries.data() + (row * heads + head) * kDim;
        const float unit = power_of_two_scale(std::accumulate(query, query + kDim, 0.0F, amax_with));
        double dot = 0.0;
        double magnitude = 0.0;
        for (std::size_t d = 0; d < kDim; ++d) {
          const double product = static_cast<double>(from_e4m3(to_e4m3(query[d] / unit))) * unit * key[d];
          dot += product;
          magnitude += std::abs(product);
        }
        sum += inputs.weights[row * heads + head] * std::max(dot, 0.0);
        size += std::abs(inputs.weights[row * heads + head]) * magnitude;
      }
      const double error =
          std::abs(scores[row * static_cast<std::size_t>(gpu.sizes.score_stride()) + token] - sum * scale) /
          (size * scale);
      worst = std::max(worst, error);
      ASSERT_LE(error, std::ldexp(1.0, -10)) << "row " << row << ", token " << token << ", " << heads << " heads";
    }
  }
  ::testing::Test::RecordProperty("worst_error", std::to_string(worst));
}

/// Scores of the same query and the same keys, from rows of a pass: every row's are the first ones of `alone`, if that
/// is given. Returns the first row's.
inline std::vector<float> scores_of_one_query(std::int32_t heads, const Sizes& sizes, BlockView block,
                                              const std::vector<float>* alone = nullptr, std::int32_t length = 2100) {
  const auto backend = make_cuda_backend(0, own_kernels());
  World world(*backend, shape_128(heads), sizes);
  const auto block_bytes = static_cast<std::size_t>(world.index_block_bytes());
  auto keys = world.index_keys.read();
  std::mt19937 engine(52);  // the same keys in every world: entry 0 has blocks 1, 3, 5, ...
  for (std::size_t i = 0; i < static_cast<std::size_t>(sizes.table_stride) * 2 * block_bytes; ++i) {
    const std::uint32_t code = engine() % 256;
    keys[i] = static_cast<std::byte>(i % block_bytes < 64 * kDim && code % 128 != 127 ? code : 0x3FU);
  }
  world.index_keys.write(keys);
  const auto row_floats = static_cast<std::size_t>(heads) * kDim;
  const auto query = normal_floats(row_floats, 53);
  const auto weights = normal_floats(static_cast<std::size_t>(heads), 54);
  Inputs inputs = zero_inputs(world);
  std::vector<std::int32_t> positions;
  for (std::int32_t row = 0; row < sizes.rows(); ++row) {
    std::ranges::copy(query, inputs.queries.begin() + static_cast<std::ptrdiff_t>(row_floats) * row);
    std::ranges::copy(weights, inputs.weights.begin() + static_cast<std::ptrdiff_t>(heads) * row);
    positions.push_back(length - sizes.query_rows - row / sizes.query_rows * 31 + row % sizes.query_rows);
  }
  world.begin(1, positions);
  auto words = world.control.read();
  const auto table = world.step().block_table - world.control.data();
  for (std::int32_t i = 0; i < sizes.batch * sizes.table_stride; ++i) {
    words[static_cast<std::size_t>(table + i)] = 2 * (i % sizes.table_stride) + 1;
  }
  world.control.write(words);
  score(world, inputs, block);
  const auto scores = world.scores.read();
  const auto stride = static_cast<std::size_t>(sizes.score_stride());
  for (std::size_t row = 0; alone != nullptr && row < static_cast<std::size_t>(block.count); ++row) {
    const auto bytes = static_cast<std::size_t>(positions[static_cast<std::size_t>(block.first) + row] + 1) * 4;
    EXPECT_EQ(std::memcmp(scores.data() + row * stride, alone->data(), bytes), 0)
        << "row " << row << " of rows " << block.first << " + " << block.count << ", batch " << sizes.batch << " x "
        << sizes.query_rows << ", " << heads << " heads";
  }
  return {scores.begin(), scores.begin() + length};
}

}  // namespace echo::cuda_test
