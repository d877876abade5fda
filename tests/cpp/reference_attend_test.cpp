#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"
#include "reference/row_codec.hpp"
#include "reference_world.hpp"

namespace echo::reference_test {
namespace {

/// A pool of random rows and a block of queries over some of them.
struct Attended {
  Attended(RowFormat format, std::int32_t rows, std::int32_t top_k, std::int32_t slots = 200)
      : world(small_shape(format, IndexKeyFormat::fp32, top_k), {.slots = slots, .batch = rows}),
        queries(normal_floats(static_cast<std::size_t>(rows * world.shape.query_heads * row_dim()), 5)),
        selected(static_cast<std::size_t>(rows * top_k), kNone) {
    const auto values = normal_floats(static_cast<std::size_t>(slots * row_dim()), 6);
    for (std::int32_t slot = 0; slot < slots; ++slot) {
      encode_row(values.data() + slot * row_dim(), world.shape, row(slot));
    }
    std::mt19937 engine(7);
    for (std::size_t i = 0; i < selected.size(); ++i) {
      const bool skipped = i % 5 == 3;
      selected[i] = skipped ? kNone : static_cast<std::int32_t>(engine() % static_cast<unsigned>(slots));
    }
  }

  std::int32_t row_dim() const { return world.shape.latent_dim + world.shape.rope_dim; }
  std::byte* row(std::int32_t slot) { return row_address(world.pool.data(), slot, row_bytes_of(world.shape)); }
  std::size_t out_size() const {
    return world.positions.size() * static_cast<std::size_t>(world.shape.query_heads * world.shape.latent_dim);
  }

  void run(CpuBackend& backend, void* out, DType out_dtype, const void* q, DType q_dtype, BlockView block) {
    backend.attend({.layer = world.layer(),
                    .block = block,
                    .shape = world.shape,
                    .q = q,
                    .q_dtype = q_dtype,
                    .scale = scale,
                    .slots = selected.data() + static_cast<std::ptrdiff_t>(block.first) * world.shape.top_k,
                    .out = out,
                    .out_dtype = out_dtype,
                    .splits = 4});
  }
  std::vector<float> run(std::int64_t threads = 1, SimdLevel level = SimdLevel::base) {
    CpuBackend backend(threads, level);
    std::vector<float> out(out_size(), std::numeric_limits<float>::quiet_NaN());
    run(backend, out.data(), DType::f32, queries.data(), DType::f32, world.all_rows());
    return out;
  }

  /// The formula in double.
  std::vector<double> expected(std::int32_t query, std::int32_t head) {
    const float* q = queries.data() + (query * world.shape.query_heads + head) * row_dim();
    std::vector<double> out(static_cast<std::size_t>(world.shape.latent_dim), 0.0);
    std::vector<float> values(static_cast<std::size_t>(row_dim()));
    double sum = 0.0;
    for (std::int32_t j = 0; j < world.shape.top_k; ++j) {
      const std::int32_t slot = selected[static_cast<std::size_t>(query * world.shape.top_k + j)];
      if (slot == kNone) {
        continue;
      }
      decode_row(row(slot), world.shape, values.data());
      double dot = 0.0;
      for (std::size_t d = 0; d < values.size(); ++d) {
        dot += static_cast<double>(q[d]) * values[d];
      }
      const double weight = std::exp(static_cast<double>(scale) * dot);
      sum += weight;
      for (std::size_t d = 0; d < out.size(); ++d) {
        out[d] += weight * values[d];
      }
    }
    for (double& value : out) {
      value = sum == 0.0 ? 0.0 : value / sum;
    }
    return out;
  }

  World world;
  std::vector<float> queries;
  std::vector<std::int32_t> selected;
  float scale = 0.05F;
};

class Attend : public ::testing::TestWithParam<RowFormat> {};

TEST_P(Attend, AgreesWithDouble) {
  for (const std::int32_t top_k : {1, 8, 33, 100}) {
    Attended attended(GetParam(), 3, top_k);
    std::fill_n(attended.selected.begin() + top_k, top_k, kNone);  // a row without any
    const std::vector<float> out = attended.run();
    const auto latent = static_cast<std::size_t>(attended.world.shape.latent_dim);
    std::size_t at = 0;
    for (std::int32_t query = 0; query < 3; ++query) {
      for (std::int32_t head = 0; head < attended.world.shape.query_heads; ++head) {
        const std::vector<double> expected = attended.expected(query, head);
        for (std::size_t d = 0; d < latent; ++d, ++at) {
          ASSERT_NEAR(out[at], expected[d], 2e-5) << top_k << " " << query << " " << head << " " << d;
          ASSERT_TRUE(query != 1 || out[at] == 0.0F);
        }
      }
    }
  }
}

TEST_P(Attend, SameBitsWithAnyThreadsVectorsAndBatch) {
  Attended attended(GetParam(), 5, 40);
  const std::vector<float> out = attended.run();
  for (const SimdLevel level : usable_simd_levels()) {
    for (const std::int64_t threads : {1, 4}) {
      EXPECT_TRUE(same_bits(attended.run(threads, level), out));
      CpuBackend backend(threads, level);
      std::vector<float> alone(out.size());
      for (std::int32_t row = 0; row < 5; ++row) {  // heads are divided among threads here
        attended.run(backend, alone.data(), DType::f32, attended.queries.data(), DType::f32, {row, 1, 0});
      }
      EXPECT_TRUE(same_bits(alone, out));
    }
  }
}

TEST_P(Attend, GapsInTheSelectionChangeNothing) {
  Attended attended(GetParam(), 1, 40);
  std::fill(attended.selected.begin() + 20, attended.selected.end(), kNone);
  const std::vector<float> out = attended.run();
  std::ranges::stable_partition(attended.selected, [](std::int32_t slot) { return slot != kNone; });
  EXPECT_TRUE(same_bits(attended.run(), out));
  std::rotate(attended.selected.begin(), attended.selected.begin() + 22, attended.selected.end());
  EXPECT_TRUE(same_bits(attended.run(), out));
}

TEST_P(Attend, UnusedSlotsAreNeverRead) {
  Attended attended(GetParam(), 2, 16);
  const std::vector<float> out = attended.run();
  for (std::int32_t slot = 0; slot < attended.world.sizes.slots; ++slot) {
    if (std::ranges::count(attended.selected, slot) == 0) {
      std::memset(attended.row(slot), 0xFF, static_cast<std::size_t>(row_bytes_of(attended.world.shape)));
    }
  }
  EXPECT_TRUE(same_bits(attended.run(), out));
}

TEST_P(Attend, Bf16QueriesAndOutputs) {
  Attended attended(GetParam(), 2, 16);
  std::vector<std::uint16_t> halves;
  for (float& value : attended.queries) {
    halves.push_back(to_bf16(value));
    value = from_bf16(halves.back());
  }
  const std::vector<float> wide = attended.run();
  std::vector<std::uint16_t> out(attended.out_size());
  CpuBackend backend(1);
  attended.run(backend, out.data(), DType::bf16, halves.data(), DType::bf16, attended.world.all_rows());
  std::size_t differing = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    differing += out[i] != to_bf16(wide[i]) ? 1U : 0U;
  }
  EXPECT_EQ(differing, 0U);
}

TEST_P(Attend, LargeLogitsDoNotOverflow) {
  Attended attended(GetParam(), 1, 16);
  attended.scale = 1e4F;
  for (const float value : attended.run()) {
    ASSERT_TRUE(std::isfinite(value));
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, Attend, ::testing::Values(RowFormat::fp8_656, RowFormat::bf16_1152, RowFormat::fp32),
                         [](const auto& test) { return std::string(to_string(test.param)); });

TEST(AttendRefusals, RawRowsAndSlotsThatAreNotThere) {
  Attended raw(RowFormat::fp32, 1, 8);
  raw.world.shape.row_format = RowFormat::raw;
  EXPECT_THROW(raw.run(), NotSupported);
  for (const std::int32_t bad : {200, -2, std::numeric_limits<std::int32_t>::max()}) {
    Attended attended(RowFormat::fp32, 1, 8);
    attended.selected[0] = bad;
    EXPECT_THROW(attended.run(2), StateError);
  }
}

}  // namespace
}  // namespace echo::reference_test
