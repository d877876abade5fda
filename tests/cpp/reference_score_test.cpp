#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"
#include "reference_world.hpp"

namespace echo::reference_test {
namespace {

constexpr float kPoison = -12345.0F;

/// A batch whose entries all have tokens up to their positions, with random index keys.
struct Scored {
  Scored(IndexKeyFormat format, const WorldSizes& sizes, std::vector<std::int32_t> positions)
      : world(small_shape(RowFormat::fp32, format), sizes) {
    world.positions = std::move(positions);
    const auto rows = world.positions.size();
    const auto heads = static_cast<std::size_t>(world.shape.index_heads);
    const auto dim = static_cast<std::size_t>(world.shape.index_dim);
    keys = normal_floats(world.slot_of.size() * dim, 1, 3.0F);
    for (std::size_t row = 0; row < world.slot_of.size(); ++row) {
      encode_key(row);
    }
    queries = normal_floats(rows * heads * dim, 2);
    weights = normal_floats(rows * heads, 3);
  }

  /// By definition, independent of the product's encoder except for the formats themselves.
  void encode_key(std::size_t row) {
    const auto dim = static_cast<std::size_t>(world.shape.index_dim);
    float* key = keys.data() + row * dim;
    std::byte* block = world.index_keys.data() + row / 64 * static_cast<std::size_t>(world.index_block_bytes());
    if (world.shape.index_key_format == IndexKeyFormat::fp32) {
      std::memcpy(block + row % 64 * dim * 4, key, dim * 4);
      return;
    }
    const float scale = quantise(key, dim);
    for (std::size_t d = 0; d < dim; ++d) {
      block[row % 64 * dim + d] = std::byte{to_e4m3(key[d] / scale)};
    }
    std::memcpy(block + 64 * dim + row % 64 * 4, &scale, 4);
  }
  static float quantise(float* values, std::size_t dim) {
    float amax = 0.0F;
    for (std::size_t d = 0; d < dim; ++d) {
      amax = std::max(amax, std::fabs(values[d]));
    }
    const float scale = power_of_two_scale(amax);
    for (std::size_t d = 0; d < dim; ++d) {
      values[d] = from_e4m3(to_e4m3(values[d] / scale)) * scale;
    }
    return scale;
  }

  std::vector<float> run(std::int64_t threads, SimdLevel level, BlockView block) {
    CpuBackend backend(threads, level);
    std::vector<float> scores(static_cast<std::size_t>(block.count) * stride(), kPoison);
    backend.score({.layer = world.layer(),
                   .step = world.step(),
                   .block = block,
                   .shape = world.shape,
                   .index_q = queries.data(),
                   .index_q_dtype = DType::f32,
                   .index_weights = weights.data(),
                   .scores = scores.data(),
                   .score_stride = static_cast<std::int64_t>(stride())});
    return scores;
  }
  std::vector<float> run() { return run(1, SimdLevel::base, world.all_rows()); }
  /// Not a multiple of 64, and no larger than the longest row needs.
  std::size_t stride() const {
    return static_cast<std::size_t>(1 + *std::max_element(world.positions.begin(), world.positions.end()));
  }

  /// In double; the query of each head quantised where keys are.
  double expected(std::size_t row, std::int32_t position, double& magnitude) const {
    const auto heads = static_cast<std::size_t>(world.shape.index_heads);
    const auto dim = static_cast<std::size_t>(world.shape.index_dim);
    const auto entry = static_cast<std::int32_t>(row) / world.sizes.query_rows;
    const float* key = keys.data() + static_cast<std::size_t>(world.host_row_at(entry, position)) * dim;
    double score = 0.0;
    for (std::size_t h = 0; h < heads; ++h) {
      std::vector<float> query(queries.begin() + static_cast<std::ptrdiff_t>((row * heads + h) * dim),
                               queries.begin() + static_cast<std::ptrdiff_t>((row * heads + h + 1) * dim));
      if (world.shape.index_key_format == IndexKeyFormat::fp8) {
        quantise(query.data(), dim);
      }
      double dot = 0.0;
      for (std::size_t d = 0; d < dim; ++d) {
        dot += static_cast<double>(query[d]) * key[d];
        magnitude += std::fabs(static_cast<double>(query[d]) * key[d] * weights[row * heads + h]);
      }
      score += weights[row * heads + h] * std::max(dot, 0.0);
    }
    return score;
  }

  World world;
  std::vector<float> keys;  ///< [host rows, dim] as decoded
  std::vector<float> queries;
  std::vector<float> weights;
};

constexpr WorldSizes kThreeEntries{.host_blocks = 12, .batch = 3, .query_rows = 2};

class Score : public ::testing::TestWithParam<IndexKeyFormat> {};

TEST_P(Score, AgreesWithDouble) {
  Scored scored(GetParam(), kThreeEntries, {0, 1, kNone, kNone, 129, 130});
  const std::vector<float> scores = scored.run();
  for (std::size_t row = 0; row < scored.world.positions.size(); ++row) {
    for (std::int32_t s = 0; s < static_cast<std::int32_t>(scored.stride()); ++s) {
      const float score = scores[row * scored.stride() + static_cast<std::size_t>(s)];
      if (s > scored.world.positions[row]) {
        EXPECT_EQ(score, kPoison) << "written behind row " << row;
        continue;
      }
      double magnitude = 0.0;
      const double expected = scored.expected(row, s, magnitude);
      EXPECT_NEAR(score, expected, 1e-5 * magnitude) << row << " " << s;
    }
  }
}

TEST_P(Score, SameBitsOnEveryInstructionSetAndThreadCount) {
  Scored scored(GetParam(), kThreeEntries, {62, 63, 64, 65, 200, 201});
  const std::vector<float> scores = scored.run();
  for (const SimdLevel level : usable_simd_levels()) {
    for (const std::int64_t threads : {1, 4}) {
      EXPECT_TRUE(same_bits(scored.run(threads, level, scored.world.all_rows()), scores));
    }
  }
}

TEST_P(Score, SameBitsWhateverTheBlockOfRows) {
  Scored scored(GetParam(), {.host_blocks = 12, .batch = 1, .query_rows = 6}, {100, 101, 102, 103, 104, 105});
  const std::vector<float> scores = scored.run();
  for (std::int32_t row = 0; row < 6; ++row) {
    const std::vector<float> alone = scored.run(2, usable_simd_levels().back(), {row, 1, 0});
    for (std::int32_t s = 0; s <= scored.world.positions[static_cast<std::size_t>(row)]; ++s) {
      EXPECT_EQ(alone[static_cast<std::size_t>(s)],
                scores[static_cast<std::size_t>(row) * scored.stride() + static_cast<std::size_t>(s)]);
    }
  }
}

TEST_P(Score, SameKeySameBitsAnywhereInABlock) {
  Scored scored(GetParam(), {.host_blocks = 4}, {255});
  const auto dim = static_cast<std::ptrdiff_t>(scored.world.shape.index_dim);
  for (std::size_t row = 1; row < 256; ++row) {
    std::copy_n(scored.keys.begin(), dim, scored.keys.begin() + static_cast<std::ptrdiff_t>(row) * dim);
    scored.encode_key(row);
  }
  for (const SimdLevel level : usable_simd_levels()) {
    const std::vector<float> scores = scored.run(1, level, scored.world.all_rows());
    for (const float score : scores) {
      EXPECT_EQ(bits_of(score), bits_of(scores[0]));
    }
  }
}

TEST_P(Score, Bf16QueriesAreTheirFloats) {
  Scored scored(GetParam(), {}, {70});
  std::vector<std::uint16_t> halves;
  for (float& value : scored.queries) {
    halves.push_back(to_bf16(value));
    value = from_bf16(halves.back());
  }
  std::vector<float> scores(scored.stride());
  CpuBackend(1).score({.layer = scored.world.layer(),
                       .step = scored.world.step(),
                       .block = scored.world.all_rows(),
                       .shape = scored.world.shape,
                       .index_q = halves.data(),
                       .index_q_dtype = DType::bf16,
                       .index_weights = scored.weights.data(),
                       .scores = scores.data(),
                       .score_stride = static_cast<std::int64_t>(scores.size())});
  EXPECT_TRUE(same_bits(scores, scored.run()));
}

TEST_P(Score, NanKeysGiveNanScores) {
  Scored scored(GetParam(), {}, {70});
  const auto row = static_cast<std::size_t>(scored.world.host_row_at(0, 5));
  scored.keys[row * static_cast<std::size_t>(scored.world.shape.index_dim)] = std::numeric_limits<float>::quiet_NaN();
  scored.encode_key(row);
  const std::vector<float> scores = scored.run();
  for (std::size_t s = 0; s < scores.size(); ++s) {
    EXPECT_EQ(std::isnan(scores[s]), s == 5) << s;
  }
}

TEST_P(Score, MalformedStepsAreRefused) {
  Scored scored(GetParam(), {}, {70});
  scored.world.block_table[1] = 4;
  EXPECT_THROW(scored.run(), StateError);
  scored.world.block_table[1] = kNone;
  EXPECT_THROW(scored.run(), StateError);
  scored.world.positions[0] = 256;
  EXPECT_THROW(scored.run(), StateError);
}

INSTANTIATE_TEST_SUITE_P(Keys, Score, ::testing::Values(IndexKeyFormat::fp8, IndexKeyFormat::fp32),
                         [](const auto& test) { return std::string(to_string(test.param)); });

}  // namespace
}  // namespace echo::reference_test
