// score of FP8 keys of 128 dimensions on the GPU, which Hopper's tensor cores compute. From single numbers, which tell
// what lies in the wrong place, to whole batches. Small integers are exact on every kernel, so they must agree with the
// CPU to the bit; other numbers within what tensor cores keep of a product.

#include <utility>

#include "cuda_score_128_world.hpp"

namespace echo::cuda_test {
namespace {

using CudaScore128 = CudaTest;

TEST_F(CudaScore128, OneDimensionOfOneHead) {
  Pair128 pair(64, {.batch = kDim, .table_stride = 1});
  const auto value = [](int block, int token, int d) { return (block + token * 7 + d * 3) % 15 + 1; };
  set_keys(pair, [&](int block, int token, int d) { return static_cast<float>(value(block, token, d)); });
  Inputs inputs = zero_inputs(pair.gpu);
  for (std::size_t row = 0; row < kDim; ++row) {
    const std::size_t query = row * 64 + row * 5 % 64;
    inputs.queries[query * kDim + row] = 1.0F;
    inputs.weights[query] = 1.0F;
  }
  pair.gpu.begin(1, std::vector<std::int32_t>(kDim, 63));
  score(pair.gpu, inputs, pair.gpu.all_rows());
  const auto scores = pair.gpu.scores.read();
  for (int row = 0; row < kDim; ++row) {
    for (int token = 0; token < 64; ++token) {
      ASSERT_EQ(scores[static_cast<std::size_t>(row * 64 + token)], value(2 * row + 1, token, row))
          << "dimension " << row << " of head " << row * 5 % 64 << ", token " << token;
    }
  }
}

TEST_F(CudaScore128, WeightsOfHeadsAndScalesOfKeys) {
  for (const std::int32_t heads : {8, 16, 32, 40, 64}) {
    Pair128 pair(heads, {.batch = heads, .table_stride = 1});
    const auto value = [](int token, int d) { return (token * 5 + d) % 13 + 1; };
    const auto scale = [](int token) { return std::ldexp(1.0F, token - 32); };
    set_keys(pair, [&](int, int token, int d) { return static_cast<float>(value(token, d)); }, scale);
    Inputs inputs = zero_inputs(pair.gpu);
    for (std::size_t row = 0; row < static_cast<std::size_t>(heads); ++row) {
      for (std::size_t head = 0; head < static_cast<std::size_t>(heads); ++head) {
        inputs.queries[(row * static_cast<std::size_t>(heads) + head) * kDim + head] = 1.0F;
      }
      inputs.weights[row * static_cast<std::size_t>(heads) + row] = 1.0F;
    }
    pair.gpu.begin(1, std::vector<std::int32_t>(static_cast<std::size_t>(heads), 63));
    score(pair.gpu, inputs, pair.gpu.all_rows());
    const auto scores = pair.gpu.scores.read();
    for (int head = 0; head < heads; ++head) {
      for (int token = 0; token < 64; ++token) {
        ASSERT_EQ(scores[static_cast<std::size_t>(head * 64 + token)],
                  static_cast<float>(value(token, head)) * scale(token))
            << "head " << head << " of " << heads << ", token " << token;
      }
    }
  }
}

TEST_F(CudaScore128, IntegersAtAllLengths) {
  for (const std::int32_t heads : {8, 16, 32, 40, 64}) {
    Pair128 pair(heads, {.batch = 11, .table_stride = 10});
    set_integer_keys(pair, 30);
    const Inputs inputs = integer_inputs(pair.gpu, 31);
    const std::vector<std::int32_t> positions = {0, 1, 62, 63, 64, 255, 256, 300, kNone, 511, 639};
    expect_equal_scores(pair, inputs, positions, pair.gpu.all_rows());
  }
}

TEST_F(CudaScore128, RowsOfASession) {
  for (const std::int32_t heads : {8, 32, 64}) {
    for (const std::int32_t query_rows : {2, 3, 4, 7, 20}) {
      const Sizes sizes{.batch = 4, .query_rows = query_rows, .table_stride = 5};
      Pair128 pair(heads, sizes);
      set_integer_keys(pair, 32);
      const Inputs inputs = integer_inputs(pair.gpu, 33);
      std::vector<std::int32_t> positions;
      for (const std::int32_t first : {0, 62, kNone, 299 - query_rows}) {
        for (std::int32_t row = 0; row < query_rows; ++row) {
          positions.push_back(first == kNone ? kNone : first + row);
        }
      }
      const std::int32_t rows = sizes.rows();
      for (const auto& [first, count] : {std::pair{0, rows}, {query_rows, query_rows}, {1, rows - 2}, {rows - 1, 1}}) {
        expect_equal_scores(pair, inputs, positions, {.first = first, .count = count, .tick_offset = 0});
      }
    }
  }
}

TEST_F(CudaScore128, BlocksOfAPrompt) {
  for (const std::int32_t heads : {8, 32, 64}) {
    const Sizes sizes{.batch = 1, .query_rows = 150, .table_stride = 9};
    Pair128 pair(heads, sizes);
    set_integer_keys(pair, 34);
    const Inputs inputs = integer_inputs(pair.gpu, 35);
    std::vector<std::int32_t> positions(150);
    std::iota(positions.begin(), positions.end(), 400);
    std::fill(positions.begin() + 140, positions.end(), kNone);
    for (const auto& [first, count] : {std::pair{0, 64}, {64, 64}, {128, 22}, {13, 1}, {0, 150}}) {
      expect_equal_scores(pair, inputs, positions, {.first = first, .count = count, .tick_offset = 0});
    }
  }
}

TEST_F(CudaScore128, ManyShortRows) {
  const Sizes sizes{.batch = 700, .table_stride = 3};
  Pair128 pair(32, sizes);
  set_integer_keys(pair, 36);
  const Inputs inputs = integer_inputs(pair.gpu, 37);
  std::mt19937 engine(38);
  std::vector<std::int32_t> positions(700);
  std::ranges::generate(positions, [&] { return static_cast<std::int32_t>(engine() % 200U) - 8; });
  std::ranges::replace_if(positions, [](std::int32_t p) { return p < 0 || p >= 192; }, kNone);
  expect_equal_scores(pair, inputs, positions, pair.gpu.all_rows());
  expect_equal_scores(pair, inputs, positions, {.first = 33, .count = 66, .tick_offset = 0});
}

TEST_F(CudaScore128, LongRows) {
  const Sizes sizes{.batch = 5, .table_stride = 2100};
  Pair128 pair(64, sizes);
  set_integer_keys(pair, 39);
  const Inputs inputs = integer_inputs(pair.gpu, 40);
  expect_equal_scores(pair, inputs, {131'199, 0, 16'384, kNone, 64}, pair.gpu.all_rows());
}

TEST_F(CudaScore128, OtherNumbersWithinTheirRounding) {
  for (const std::int32_t heads : {8, 32, 64}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Sizes sizes{.batch = 5, .table_stride = 8};
      Pair128 pair(heads, sizes);
      fill_keys(pair, 41);
      const Inputs inputs = rounded_to_bf16(random_inputs(pair.gpu, 42));
      const std::vector<std::int32_t> positions = {511, 0, 100, kNone, 257};
      pair.gpu.begin(1, positions);
      score(pair.gpu, inputs, pair.gpu.all_rows(), dtype);
      expect_within_rounding(pair.gpu, inputs, positions);
    }
  }
}

TEST_F(CudaScore128, UnusedTokensLeaveNoTrace) {
  Pair128 pair(64, {.batch = 4, .table_stride = 4});
  set_integer_keys(pair, 43);
  const Inputs inputs = integer_inputs(pair.gpu, 44);
  const std::vector<std::int32_t> positions = {0, 62, 64, 130};
  auto keys = pair.gpu.index_keys.read();  // NaN in whatever is behind a row's position
  const auto block_bytes = static_cast<std::size_t>(pair.gpu.index_block_bytes());
  for (std::size_t row = 0; row < 4; ++row) {
    for (std::size_t token = static_cast<std::size_t>(positions[row]) + 1; token < 4 * 64; ++token) {
      std::byte* block = keys.data() + (2 * (row * 4 + token / 64) + 1) * block_bytes;
      std::memset(block + token % 64 * kDim, 0xFF, kDim);
      std::memset(block + 64 * kDim + token % 64 * sizeof(float), 0xFF, sizeof(float));
    }
  }
  pair.gpu.index_keys.write(keys);
  expect_equal_scores(pair, inputs, positions, pair.gpu.all_rows());
}

TEST_F(CudaScore128, NanAndInfinity) {
  for (const std::int32_t heads : {8, 64}) {
    Pair128 pair(heads, {.batch = 4, .table_stride = 2});
    set_integer_keys(pair, 45);
    auto keys = pair.cpu.index_keys.read();
    const auto first = static_cast<std::size_t>(pair.cpu.index_block_bytes());  // block 1 is row 0's first
    keys[first + 5 * kDim + 77] = std::byte{0x7F};
    keys[first + 9 * kDim] = std::byte{0xFF};
    pair.both([&](World& world) { world.index_keys.write(keys); });
    Inputs inputs = integer_inputs(pair.gpu, 46);
    const auto query = static_cast<std::size_t>(heads) * kDim;  // floats of a row
    inputs.queries[query + 3 * kDim + 100] = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(inputs.queries.begin() + static_cast<std::ptrdiff_t>(2 * query), query, 0.0F);
    std::fill_n(inputs.weights.begin() + 3 * heads, heads, 0.0F);
    inputs.queries[3 * query + 2 * kDim + 1] = -std::numeric_limits<float>::infinity();
    inputs.weights[3 * static_cast<std::size_t>(heads) + 2] = std::ldexp(1.0F, -20);
    expect_equal_scores(pair, inputs, {127, 127, 100, 90}, pair.gpu.all_rows());
    const auto scores = pair.gpu.scores.read();
    EXPECT_TRUE(std::isnan(scores[5]) && std::isnan(scores[9]) && std::isfinite(scores[6]));
    EXPECT_TRUE(std::isnan(scores[128]) && std::isnan(scores[255]));
    EXPECT_EQ(scores[256], 0.0F);
  }
}

TEST_F(CudaScore128, WhatIsOutOfBoundsIsReported) {
  Pair128 pair(64, {.batch = 3, .table_stride = 4});
  set_integer_keys(pair, 47);
  const Inputs inputs = integer_inputs(pair.gpu, 48);
  std::vector<std::int32_t> positions = {200, 256, 255};
  pair.gpu.begin(1, positions);
  EXPECT_THROW(score(pair.gpu, inputs, pair.gpu.all_rows()), StateError);
  positions[1] = kNone;  // such a row counts as absent
  expect_equal_scores(pair, inputs, positions, pair.gpu.all_rows(), /*on_gpu=*/false);

  pair.gpu.begin(1, positions);
  auto words = pair.gpu.control.read();
  const auto table = static_cast<std::size_t>(pair.gpu.step().block_table - pair.gpu.control.data());
  words[table + 1] = pair.gpu.sizes.host_blocks();
  words[table + 8] = -7;
  pair.gpu.control.write(words);
  pair.gpu.scores.write(std::vector<float>(pair.gpu.scores.size(), -1.0F));
  EXPECT_THROW(score(pair.gpu, inputs, pair.gpu.all_rows()), StateError);
  const auto expected = pair.cpu.scores.read();
  const auto scores = pair.gpu.scores.read();
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const bool absent = (i >= 64 && i < 128) || (i >= 512 && i < 576) || std::isinf(expected[i]);
    ASSERT_EQ(scores[i], absent ? -1.0F : expected[i]) << i;
  }
}

TEST_F(CudaScore128, MoreKeyBlocksThanItCountsAreRefused) {
  if (!can_score_128()) {
    GTEST_SKIP() << "no kernel of its own for this device in this build";
  }
  Pair128 pair(64, {.batch = 3, .table_stride = 4});
  const Inputs inputs = zero_inputs(pair.gpu);
  const DeviceArray queries(pair.gpu.backend, inputs.queries);
  const DeviceArray weights(pair.gpu.backend, inputs.weights);
  pair.gpu.begin(1, {0, 0, 0});
  auto params = params_of(pair.gpu, pair.gpu.all_rows(), queries.data(), DType::f32, weights.data());
  params.score_stride = std::int64_t{1} << 40;
  EXPECT_THROW(pair.gpu.backend.score(params), InvalidArgument);
}

TEST_F(CudaScore128, BitsDependOnQueryAndKeyAlone) {
  for (const std::int32_t heads : {32, 64}) {
    const auto sizes = [](std::int32_t batch, std::int32_t query_rows) {
      return Sizes{.batch = batch, .query_rows = query_rows, .table_stride = 34};
    };
    const auto block = [](std::int32_t first, std::int32_t count) {
      return BlockView{.first = first, .count = count, .tick_offset = 0};
    };
    const auto alone = scores_of_one_query(heads, sizes(1, 1), block(0, 1));
    for (const std::int32_t batch : {2, 3, 13, 64}) {
      scores_of_one_query(heads, sizes(batch, 1), block(0, batch), &alone);
      scores_of_one_query(heads, sizes(batch, 1), block(batch - 1, 1), &alone);
    }
    for (const std::int32_t query_rows : {2, 3, 4, 64}) {
      scores_of_one_query(heads, sizes(3, query_rows), block(0, 3 * query_rows), &alone);
      scores_of_one_query(heads, sizes(3, query_rows), block(query_rows + 1, 1), &alone);
    }
  }
}

/// Thread blocks of 132 have more than a hundred key blocks each; sessions have an odd number of them, so that the two
/// warps that ask for them in turns begin a session either way.
TEST_F(CudaScore128, BitsAreTheSameInLongShares) {
  constexpr std::int32_t kLength = 251 * 64;
  const auto scores_of = [](std::int32_t batch, std::int32_t query_rows, const std::vector<float>* alone) {
    const Sizes sizes{.batch = batch, .query_rows = query_rows, .table_stride = kLength / 64};
    const BlockView rows{.first = 0, .count = sizes.rows(), .tick_offset = 0};
    return scores_of_one_query(64, sizes, rows, alone, kLength);
  };
  const auto alone = scores_of(1, 1, nullptr);
  scores_of(64, 1, &alone);
  scores_of(70, 1, &alone);
  scores_of(64, 2, &alone);
}

TEST_F(CudaScore128, TheSettingDecidesWhichKernelScores) {
  for (const RuntimeConfig& config : {generic_kernels(), own_kernels()}) {
    Pair pair(shape_128(64), {.batch = 2, .table_stride = 1}, config);
    set_integer_keys(pair, 55);
    const DeviceArray queries(pair.gpu.backend, filled(2 * 64 * kDim + 1, 1.0F));
    const DeviceArray weights(pair.gpu.backend, filled(2 * 64, 1.0F));
    pair.gpu.begin(1, {63, 63});
    const auto call = [&] {  // only the generic kernel takes queries that are not aligned to 16 bytes
      pair.gpu.backend.score(params_of(pair.gpu, pair.gpu.all_rows(), queries.data() + 1, DType::f32, weights.data()));
      pair.gpu.backend.synchronize();
    };
    if (config.kernels == "auto" && can_score_128()) {
      EXPECT_THROW(call(), InvalidArgument);
    } else {
      EXPECT_NO_THROW(call());
    }
  }
}

TEST_F(CudaScore128, ReplaysReadNewLengths) {
  Pair128 pair(64, {.batch = 6, .table_stride = 20});
  set_integer_keys(pair, 49);
  const Inputs inputs = integer_inputs(pair.gpu, 50);
  const DeviceArray queries(pair.gpu.backend, inputs.queries);
  const DeviceArray weights(pair.gpu.backend, inputs.weights);
  const auto replay = pair.gpu.backend.capture([&] {
    pair.gpu.backend.score(params_of(pair.gpu, pair.gpu.all_rows(), queries.data(), DType::f32, weights.data()));
  });
  std::mt19937 engine(51);
  for (int turn = 0; turn < 8; ++turn) {
    std::vector<std::int32_t> positions(6);
    std::ranges::generate(positions, [&] { return static_cast<std::int32_t>(engine() % 1280U); });
    positions[static_cast<std::size_t>(turn % 6)] = kNone;
    if (turn == 5) {
      std::ranges::fill(positions, kNone);
    }
    pair.gpu.begin(turn, positions);
    pair.gpu.scores.write(std::vector<float>(pair.gpu.scores.size(), std::numeric_limits<float>::infinity()));
    replay();
    pair.gpu.backend.synchronize();
    expect_equal_scores(pair, inputs, positions, pair.gpu.all_rows(), /*on_gpu=*/false);
  }
}

TEST_F(CudaScore128, AReplaySeesTheKeysThatItAppends) {
  Pair128 pair(64, {.batch = 6, .table_stride = 20});
  set_integer_keys(pair, 56);
  const Inputs inputs = integer_inputs(pair.gpu, 57);
  const DeviceArray queries(pair.gpu.backend, inputs.queries);
  const DeviceArray weights(pair.gpu.backend, inputs.weights);
  DeviceArray keys(pair.gpu.backend, filled(6 * kDim, 0.0F));
  const auto append = [](World& world, const float* index_keys) {
    world.backend.append({.layer = world.layer(),
                          .step = world.step(),
                          .shape = world.shape,
                          .kv = nullptr,
                          .kv_dtype = DType::f32,
                          .index_key = index_keys,
                          .index_key_dtype = DType::f32});
  };
  const auto replay = pair.gpu.backend.capture([&] {
    append(pair.gpu, keys.data());
    pair.gpu.backend.score(params_of(pair.gpu, pair.gpu.all_rows(), queries.data(), DType::f32, weights.data()));
  });
  std::mt19937 engine(58);
  for (int turn = 0; turn < 32; ++turn) {
    std::vector<std::int32_t> positions(6);
    std::ranges::generate(positions, [&] { return static_cast<std::int32_t>(engine() % 1280U); });
    std::vector<float> appended(6 * kDim);
    std::ranges::generate(appended, [&] { return static_cast<float>(engine() % 7U) - 3.0F; });
    pair.gpu.begin(turn, positions);
    keys.write(appended);
    pair.gpu.scores.write(filled(pair.gpu.scores.size(), std::numeric_limits<float>::infinity()));
    replay();
    pair.gpu.backend.synchronize();
    pair.cpu.begin(turn, positions);
    append(pair.cpu, appended.data());
    expect_equal_scores(pair, inputs, positions, pair.gpu.all_rows(), /*on_gpu=*/false);
  }
}

}  // namespace
}  // namespace echo::cuda_test
