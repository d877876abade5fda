// score that appends the keys of the pass's rows itself writes what append would, and scores it: with all kernels, the
// index cache and the scores are those of the CPU. The new keys lie at both ends of blocks and across them, and fill a
// block or two of a row that many thread blocks share.

#include <utility>

#include "cuda_score_128_world.hpp"

namespace echo::cuda_test {
namespace {

using CudaScoreAppend = CudaTest;

void score_and_append(World& world, const Inputs& inputs, const std::vector<float>& keys, DType dtype) {
  const DeviceArray queries(world.backend, inputs.queries);
  const DeviceArray weights(world.backend, inputs.weights);
  const DeviceArray floats(world.backend, keys);
  const DeviceArray halves(world.backend, upper_halves(keys));
  ScoreParams params = params_of(world, world.all_rows(), queries.data(), DType::f32, weights.data());
  params.index_key = dtype == DType::f32 ? static_cast<const void*>(floats.data()) : halves.data();
  params.index_key_dtype = dtype;
  world.scores.write(filled(world.scores.size(), std::numeric_limits<float>::infinity()));
  world.backend.score(params);
  world.backend.synchronize();  // before the inputs go
}

/// The CPU's index cache and scores, or the test has failed.
void expect_same(Pair& pair, const std::vector<std::int32_t>& positions, unsigned seed, DType dtype) {
  set_integer_keys(pair, seed);
  const Inputs inputs = integer_inputs(pair.gpu, seed + 1);
  const auto keys = integer_keys(pair.gpu, seed + 2);
  pair.both([&](World& world) {
    world.begin(1, positions);
    score_and_append(world, inputs, keys, dtype);
  });
  ASSERT_EQ(pair.gpu.index_keys.read(), pair.cpu.index_keys.read());
  const auto expected = pair.cpu.scores.read();
  const auto got = pair.gpu.scores.read();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(got[i], expected[i]) << "row " << i / static_cast<std::size_t>(pair.cpu.sizes.score_stride());
  }
}

TEST_F(CudaScoreAppend, TheIndexCacheAndTheScoresAreTheCpus) {
  for (const RuntimeConfig& config : {generic_kernels(), own_kernels()}) {
    for (const std::int32_t query_rows : {1, 2, 4}) {
      const Sizes sizes{.batch = 6, .query_rows = query_rows, .table_stride = 5};
      Pair pair(shape_128(64), sizes, config);
      std::vector<std::int32_t> positions;
      for (const std::int32_t first : {0, 62, 64, kNone, 127, 320 - query_rows}) {
        for (std::int32_t row = 0; row < query_rows; ++row) {
          positions.push_back(first == kNone ? kNone : first + row);
        }
      }
      for (const DType dtype : {DType::f32, DType::bf16}) {
        expect_same(pair, positions, 60, dtype);
      }
    }
  }
}

/// With 64 heads a group has up to 8 rows: those of a later one see the keys of the ones before.
TEST_F(CudaScoreAppend, RowsOfASessionInSeveralGroups) {
  for (const std::int32_t query_rows : {9, 20, 64}) {
    Pair pair(shape_128(64), {.batch = 3, .query_rows = query_rows, .table_stride = 40}, own_kernels());
    for (unsigned round = 0; round < 10; ++round) {
      std::vector<std::int32_t> positions;
      for (const std::int32_t first : {0, 100 + static_cast<std::int32_t>(round), 2560 - query_rows}) {
        for (std::int32_t row = 0; row < query_rows; ++row) {
          positions.push_back(first + row);
        }
      }
      expect_same(pair, positions, 80 + round, DType::f32);
    }
  }
}

TEST_F(CudaScoreAppend, RowsThatManyThreadBlocksShare) {
  Pair128 pair(64, {.batch = 2, .table_stride = 700});
  for (unsigned round = 0; round < 20; ++round) {
    const auto last = static_cast<std::int32_t>(44'799 - round * 37);
    expect_same(pair, {last, static_cast<std::int32_t>(round * 64)}, 70 + round, DType::f32);
  }
}

/// A thread block has a dozen sessions of a block or two.
TEST_F(CudaScoreAppend, MoreNewKeysThanAThreadBlockKeeps) {
  constexpr std::int32_t kBatch = 1600;
  for (const std::int32_t heads : {32, 64}) {
    Pair pair(shape_128(heads), {.batch = kBatch, .table_stride = 2}, own_kernels());
    std::vector<std::int32_t> positions;
    for (std::int32_t row = 0; row < kBatch; ++row) {
      positions.push_back(row % 11 == 3 ? kNone : row * 37 % 128);
    }
    expect_same(pair, positions, 95, DType::f32);
  }
}

/// Each step's scores are those of the cache that the steps before have written.
TEST_F(CudaScoreAppend, StepAfterStepAsIfAppendedBefore) {
  constexpr std::int32_t kBatch = 13;
  Pair pair(shape_128(64), {.batch = kBatch, .table_stride = 40}, own_kernels());
  Pair apart(shape_128(64), {.batch = kBatch, .table_stride = 40}, own_kernels());
  set_integer_keys(pair, 90);
  set_integer_keys(apart, 90);
  for (std::int32_t step = 0; step < 150; ++step) {
    std::vector<std::int32_t> positions;
    for (std::int32_t row = 0; row < kBatch; ++row) {
      positions.push_back(row * 180 + step);
    }
    const auto seed = static_cast<unsigned>(100 + step);
    const Inputs inputs = random_inputs(pair.gpu, seed);
    const auto keys = normal_floats(static_cast<std::size_t>(kBatch) * kDim, seed);
    pair.gpu.begin(step + 1, positions);
    score_and_append(pair.gpu, inputs, keys, DType::f32);
    apart.gpu.begin(step + 1, positions);
    apart.gpu.scores.write(filled(apart.gpu.scores.size(), std::numeric_limits<float>::infinity()));
    const DeviceArray given(apart.gpu.backend, keys);
    apart.gpu.backend.append({.layer = apart.gpu.layer(),
                              .step = apart.gpu.step(),
                              .shape = apart.gpu.shape,
                              .kv = nullptr,
                              .kv_dtype = DType::f32,
                              .index_key = given.data(),
                              .index_key_dtype = DType::f32});
    score(apart.gpu, inputs, apart.gpu.all_rows());
    ASSERT_EQ(pair.gpu.index_keys.read(), apart.gpu.index_keys.read()) << "step " << step;
    const auto got = pair.gpu.scores.read();
    const auto expected = apart.gpu.scores.read();
    ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << "step " << step;
  }
}

}  // namespace
}  // namespace echo::cuda_test
