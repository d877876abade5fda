// select on the GPU: the very selection and k-th score of the CPU, whatever the scores are.

#include <bit>

#include "cuda_world.hpp"

namespace echo::cuda_test {
namespace {

using CudaSelect = CudaTest;

void expect_same(Pair& pair, const std::vector<std::int32_t>& positions, const std::vector<float>& scores) {
  pair.both([&](World& world) {
    world.begin(1, positions);
    world.scores.write(scores);
    world.selection.write(std::vector<std::int32_t>(world.entries(), 1 << 30));
    world.kth_score.write(std::vector<float>(positions.size(), -7.0F));
    world.select(world.all_rows());
  });
  ASSERT_EQ(pair.gpu.selection.read(), pair.cpu.selection.read());
  const auto expected = pair.cpu.kth_score.read();
  const auto got = pair.gpu.kth_score.read();
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(expected[i])) << i;
  }
}

/// Score distributions that break selections: name by number.
float score_of(int kind, std::mt19937& engine) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0:
      return normal(engine);
    case 1:
      return engine() % 10 == 0 ? std::abs(normal(engine)) : 0.0F;  // mostly zeros
    case 2:
      return 1.0F + 0.245F * static_cast<float>(engine() % 4096) / 4096.0F;  // one coarse bin
    case 3:
      return std::bit_cast<float>(static_cast<std::uint32_t>(engine()));  // anything, NaN and inf too
    case 4:
      return engine() % 2 == 0 ? 0.0F : -0.0F;
    case 5:
      return static_cast<float>(static_cast<int>(engine() % 5) - 2);  // ties
    case 6:
      return 1e6F * normal(engine);
    case 7:
      return std::bit_cast<float>(static_cast<std::uint32_t>(0x3F800000U + engine() % 3U));  // neighbouring floats
    default:
      return std::numeric_limits<float>::quiet_NaN();
  }
}

TEST_F(CudaSelect, SelectsLikeTheCpu) {
  for (const std::int32_t k : {1, 31, 32, 33, 64, 200}) {
    const ShapeView shape = shape_of(RowFormat::fp32, IndexKeyFormat::fp8, k);
    const Sizes sizes{.batch = 10, .table_stride = 20};
    Pair pair(shape, sizes);
    std::mt19937 engine(static_cast<unsigned>(k));
    const std::vector<std::int32_t> positions = {kNone, 0, k - 2, k - 1, k, 255, 256, 1023, 1024, 1279};
    for (int kind = 0; kind < 9; ++kind) {
      std::vector<float> scores(10 * static_cast<std::size_t>(sizes.score_stride()));
      std::ranges::generate(scores, [&] { return score_of(kind, engine); });
      // What lies behind a row's own position must not be looked at.
      for (std::size_t row = 0; row < 10; ++row) {
        const auto first = row * static_cast<std::size_t>(sizes.score_stride());
        std::fill(scores.begin() + static_cast<std::ptrdiff_t>(first) + positions[row] + 1,
                  scores.begin() + static_cast<std::ptrdiff_t>(first) + sizes.score_stride(),
                  std::numeric_limits<float>::infinity());
      }
      expect_same(pair, positions, scores);
    }
  }
}

TEST_F(CudaSelect, LongRows) {
  const ShapeView shape = shape_of(RowFormat::fp32, IndexKeyFormat::fp8, 2048);
  const Sizes sizes{.slots = 16, .batch = 3, .table_stride = 320};
  Pair pair(shape, sizes);
  std::mt19937 engine(3);
  for (int kind = 0; kind < 4; ++kind) {
    std::vector<float> scores(3 * static_cast<std::size_t>(sizes.score_stride()));
    std::ranges::generate(scores, [&] { return score_of(kind, engine); });
    expect_same(pair, {16383, 20479, 2048}, scores);
  }
}

TEST_F(CudaSelect, APartOfAPassWritesItsOwnRows) {
  const ShapeView shape = shape_of(RowFormat::fp32, IndexKeyFormat::fp8, 8);
  Pair pair(shape, {.batch = 4});
  std::mt19937 engine(4);
  std::vector<float> scores(4 * 256);
  std::ranges::generate(scores, [&] { return score_of(0, engine); });
  pair.both([&](World& world) {
    world.begin(1, {20, 30, 40, 50});
    world.scores.write(scores);
    world.select({.first = 1, .count = 2, .tick_offset = 0});
  });
  EXPECT_EQ(pair.gpu.selection.read(), pair.cpu.selection.read());
}

}  // namespace
}  // namespace echo::cuda_test
