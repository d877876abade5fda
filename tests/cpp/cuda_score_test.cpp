// The general score kernel on the GPU: close to the CPU's sums, and to the bit independent of everything but query,
// weights and key. cuda_score_128_test.cpp has the shapes that tensor cores take.

#include "cuda_score_world.hpp"

namespace echo::cuda_test {
namespace {

using CudaScore = CudaTest;

TEST_F(CudaScore, AgreesWithTheCpuAtAllLengths) {
  for (const IndexKeyFormat format : {IndexKeyFormat::fp8, IndexKeyFormat::fp32}) {
    for (const std::int32_t heads : {8, 32, 40, 64}) {
      ShapeView shape = shape_of(RowFormat::fp32, format);
      shape.index_heads = heads;
      shape.index_dim = heads == 64 ? 96 : 48;  // no kernel but the general one takes them
      const Sizes sizes{.batch = 11, .table_stride = 10};
      Pair pair(shape, sizes);
      fill_keys(pair, 20);
      const Inputs inputs = random_inputs(pair.cpu, 21);
      const std::vector<std::int32_t> positions = {0, 1, 62, 63, 64, 255, 256, 300, kNone, 511, 639};
      pair.both([&](World& world) {
        world.begin(1, positions);
        score(world, inputs, world.all_rows());
      });
      expect_close(pair.cpu, pair.gpu, positions);
    }
  }
}

TEST_F(CudaScore, QueryRowsOfASessionAndPartsOfAPass) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.batch = 3, .query_rows = 3};
  Pair pair(shape, sizes);
  fill_keys(pair, 22);
  const Inputs inputs = random_inputs(pair.cpu, 23);
  const std::vector<std::int32_t> positions = {62, 63, 64, kNone, kNone, kNone, 126, 127, 128};
  const auto stride = static_cast<std::size_t>(sizes.score_stride());
  pair.gpu.begin(1, positions);
  score(pair.gpu, inputs, pair.gpu.all_rows());
  const auto whole = pair.gpu.scores.read();
  score(pair.gpu, inputs, {.first = 6, .count = 3, .tick_offset = 0});
  const auto part = pair.gpu.scores.read();
  for (std::size_t row = 0; row < 3; ++row) {
    EXPECT_EQ(std::memcmp(part.data() + row * stride, whole.data() + (6 + row) * stride, (127 + row) * sizeof(float)),
              0);
  }
}

TEST_F(CudaScore, BitsDependOnQueryAndKeyAlone) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.batch = 6, .table_stride = 8};
  Pair pair(shape, sizes);
  fill_keys(pair, 24);
  // All keys of a block are that of its first token, all queries the same.
  auto keys = pair.gpu.index_keys.read();
  const auto dim = static_cast<std::size_t>(shape.index_dim);
  const auto block_bytes = static_cast<std::size_t>(pair.gpu.index_block_bytes());
  for (std::size_t block = 0; block < keys.size() / block_bytes; ++block) {
    for (std::size_t token = 0; token < 64; ++token) {
      std::memcpy(keys.data() + block * block_bytes + token * dim, keys.data(), dim);
      std::memcpy(keys.data() + block * block_bytes + 64 * dim + token * 4, keys.data() + 64 * dim, 4);
    }
  }
  pair.gpu.index_keys.write(keys);
  Inputs inputs = random_inputs(pair.gpu, 25);
  for (std::size_t row = 1; row < 6; ++row) {
    std::copy_n(inputs.queries.begin(), 8 * dim, inputs.queries.begin() + static_cast<std::ptrdiff_t>(row * 8 * dim));
    std::copy_n(inputs.weights.begin(), 8, inputs.weights.begin() + static_cast<std::ptrdiff_t>(row * 8));
  }
  const std::vector<std::int32_t> positions{10, 511, 64, 200, 0, 350};
  pair.gpu.begin(1, positions);
  score(pair.gpu, inputs, pair.gpu.all_rows());
  const auto scores = pair.gpu.scores.read();
  ASSERT_TRUE(std::isfinite(scores[0]));
  const std::size_t stride = scores.size() / positions.size();
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (static_cast<std::int32_t>(i % stride) <= positions[i / stride]) {
      ASSERT_EQ(scores[i], scores[0]) << i;
    }
  }
}

TEST_F(CudaScore, Bf16Queries) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.batch = 2};
  Pair pair(shape, sizes);
  fill_keys(pair, 26);
  const Inputs inputs = random_inputs(pair.cpu, 27);
  const std::vector<std::int32_t> positions = {100, 255};
  pair.both([&](World& world) {
    world.begin(1, positions);
    score(world, inputs, world.all_rows(), DType::bf16);
  });
  expect_close(pair.cpu, pair.gpu, positions);
}

}  // namespace
}  // namespace echo::cuda_test
