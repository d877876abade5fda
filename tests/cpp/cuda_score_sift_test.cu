// Sifting inside score: scores keep their bits, and candidates are exactly those above the bounds, whatever is scored,
// predicted and appended on the way. Prefetches are in cuda_score_prefetch_test.cu.

#include "cuda_score_sift_stage.hpp"

namespace echo::cuda_test {
namespace {

/// Sifts rows of some lengths under several predictions; returns how many rows have lists that do.
int sift_rows(std::int32_t heads, const Sizes& sizes, const std::vector<std::int32_t>& lengths) {
  SiftStage stage(sift_shape(heads, 256), sizes, 61);
  SiftWorld& world = stage.world;
  world.begin_sifting(1, rows_behind(lengths, sizes.query_rows));
  const auto plain = stage.plain_scores();
  int complete = 0;
  for (const float of_k : {1.0F, 0.8F, 1.3F}) {
    stage.predict(stage.predictions(of_k));
    stage.poison_scores();
    stage.sift(0.0F);
    expect_scores(world, plain);
    complete += expect_right_sifts(world);
    world.take_turns();
    if (::testing::Test::HasFailure()) {
      break;
    }
  }
  return complete;
}

TEST_F(CudaScoreSift, ScoresKeepTheirBitsAndCandidatesAreExact) {
  // One product for a row, one for two, several; the largest groups, and more than one for a session.
  for (const auto& [heads, query_rows] : {std::pair{64, 1}, {64, 2}, {64, 3}, {64, 9}, {32, 1}, {32, 2}, {32, 16}}) {
    SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(query_rows) + " rows");
    const int complete = sift_rows(heads, {.slots = 64, .batch = 7, .query_rows = query_rows, .table_stride = 110},
                                   {7'040, 5'011, kNone, 3'345, 200, 4'097, 257});
    ASSERT_FALSE(HasFailure());
    EXPECT_GE(complete, 3 * 4);
  }
}

TEST_F(CudaScoreSift, LongRowsHaveListsThatDo) {
  const int complete =
      sift_rows(64, {.slots = 64, .batch = 2, .query_rows = 1, .table_stride = 1600}, {102'400, 99'011});
  EXPECT_EQ(complete, 6);
}

TEST_F(CudaScoreSift, WhateverIsPredicted) {
  const Sizes sizes{.slots = 64, .batch = 9, .query_rows = 1, .table_stride = 150};
  SiftStage stage(sift_shape(64, 128), sizes, 62);
  SiftWorld& world = stage.world;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int turn = 0; turn < 12; ++turn) {
    std::vector<std::int32_t> lengths(9);
    std::ranges::generate(lengths, [&] { return 1 + static_cast<std::int32_t>(stage.engine() % 9'600U); });
    world.begin_sifting(turn + 1, rows_behind(lengths, 1));
    const auto plain = stage.plain_scores();
    auto predictions = stage.predictions();
    const float odd[] = {-kInf, kInf, NAN, 0.0F, -1e-30F, 1e30F, -1e30F, -3e38F};
    for (float& value : predictions.thresholds) {
      const auto any = stage.engine() % 12U;
      value = any < 8 ? odd[any] : value * (any == 8 ? 0.25F : any == 9 ? 4.0F : 1.0F);
    }
    for (float& value : predictions.deviations) {
      const auto any = stage.engine() % 16U;
      value = any < 8 ? odd[any] : value;
    }
    stage.predict(predictions);
    stage.poison_scores();
    stage.sift(1.0F);
    expect_scores(world, plain);
    expect_right_sifts(world);
    world.check();
    ASSERT_FALSE(HasFailure()) << turn;
  }
}

TEST_F(CudaScoreSift, WhateverIsScored) {
  constexpr std::int32_t kK = 128;
  const Sizes sizes{.slots = 64, .batch = 9, .query_rows = 1, .table_stride = 150};
  SiftStage stage(sift_shape(64, kK), sizes, 74);
  SiftWorld& world = stage.world;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kOdd[] = {kInf, -kInf, NAN, 0.0F, -0.0F, 1e30F, -1e-30F, 3e38F};
  const auto keys = world.index_keys.read();
  const auto block_bytes = static_cast<std::size_t>(world.index_block_bytes());
  for (int turn = 0; turn < 8; ++turn) {
    SCOPED_TRACE(turn);
    auto odd_keys = keys;
    for (std::size_t block = 0; block < keys.size() / block_bytes; ++block) {
      std::byte* own = odd_keys.data() + block * block_bytes;
      for (std::size_t token = 0; token < 64; ++token) {
        if (stage.engine() % (4U << turn) == 0) {  // from a quarter of them to hardly any
          std::memcpy(own + 64 * kDim + token * sizeof(float), kOdd + stage.engine() % 8, sizeof(float));
        }
      }
      own[stage.engine() % (64 * kDim)] = static_cast<std::byte>(turn % 2 == 0 ? 0x7F : 0x38);
    }
    world.index_keys.write(odd_keys);
    std::vector<std::int32_t> lengths(9);
    std::ranges::generate(lengths, [&] { return kK + static_cast<std::int32_t>(stage.engine() % 9'400U); });
    world.begin_sifting(turn + 1, rows_behind(lengths, 1));
    const auto plain = stage.plain_scores();
    stage.predict(stage.predictions());
    stage.poison_scores();
    stage.sift(0.0F);
    expect_scores(world, plain);
    expect_right_sifts(world);
    world.select_sifted();
    const auto selection = world.selection.read();
    for (std::int32_t row = 0; row < 9; ++row) {
      const auto first = selection.begin() + row * kK;
      ASSERT_EQ(std::vector<std::int32_t>(first, first + kK), best_of(world.scores_of(row), kK)) << row;
    }
    ASSERT_FALSE(HasFailure());
  }
}

TEST_F(CudaScoreSift, ManySessionsPerThreadBlock) {
  const Sizes sizes{.slots = 64, .batch = 300, .query_rows = 1, .table_stride = 12};
  SiftStage stage(sift_shape(32, 64), sizes, 63);
  SiftWorld& world = stage.world;
  std::vector<std::int32_t> lengths(300);
  std::ranges::generate(lengths, [&] { return 1 + static_cast<std::int32_t>(stage.engine() % 768U); });
  world.begin_sifting(1, rows_behind(lengths, 1));
  const auto plain = stage.plain_scores();
  stage.predict(stage.predictions());
  stage.poison_scores();
  stage.sift(0.0F);
  expect_scores(world, plain);
  EXPECT_GT(expect_right_sifts(world), 200);
}

TEST_F(CudaScoreSift, EqualScoresOverflowTheList) {
  const Sizes sizes{.slots = 64, .batch = 3, .query_rows = 1, .table_stride = 200};
  SiftStage stage(sift_shape(64, 128), sizes, 64);
  SiftWorld& world = stage.world;
  world.index_keys.write(std::vector<std::byte>(world.index_keys.size()));  // all scores are 0
  world.predict(std::vector<float>(3, 0.0F), std::vector<float>(3, 0.0F));
  world.begin_sifting(1, rows_behind({12'800, 9'000, 129}, 1));
  stage.plain_scores();
  stage.sift(1.0F);
  EXPECT_EQ(expect_right_sifts(world), 1);
  world.check();
}

/// Appends, scores and sifts in one call, in passes of so many sessions, which leaves what an append and a score would.
void append_and_sift(const Sizes& sizes, std::int32_t thread_blocks, unsigned seed) {
  SiftStage stage(sift_shape(64, 64), sizes, seed);
  SiftWorld& world = stage.world;
  world.thread_blocks = thread_blocks;
  std::mt19937& engine = stage.engine;
  const auto capacity = static_cast<std::uint32_t>(sizes.score_stride());
  const auto query_rows = static_cast<std::uint32_t>(sizes.query_rows);
  for (std::int32_t pass = 0; pass < 6; ++pass) {
    SCOPED_TRACE(pass);
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(sizes.batch));
    std::ranges::generate(lengths, [&] {
      const std::uint32_t any = query_rows + engine() % (capacity - query_rows + 1);
      return engine() % 8 == 0 ? kNone : static_cast<std::int32_t>(any);
    });
    lengths.front() = static_cast<std::int32_t>(capacity);
    lengths.back() = sizes.query_rows;
    world.begin_sifting(2 * pass + 1, rows_behind(lengths, sizes.query_rows));
    const DeviceArray keys(world.backend, normal_floats(static_cast<std::size_t>(sizes.rows()) * kDim, engine()));
    const auto before = world.index_keys.read();
    world.backend.append({.layer = world.layer(),
                          .step = world.step(),
                          .shape = world.shape,
                          .kv = nullptr,
                          .kv_dtype = DType::f32,
                          .index_key = keys.data(),
                          .index_key_dtype = DType::f32});
    const auto plain = stage.plain_scores();
    const auto after = world.index_keys.read();
    world.index_keys.write(before);
    stage.predict(stage.predictions());
    stage.poison_scores();
    stage.sift(1.0F, keys.data());
    expect_scores(world, plain);
    ASSERT_FALSE(::testing::Test::HasFailure());
    ASSERT_EQ(world.index_keys.read(), after);
    expect_right_sifts(world);
    world.check();
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
}

TEST_F(CudaScoreSift, NewKeysAreWrittenAndSiftedLikeOthers) {
  for (const std::int32_t query_rows : {1, 2, 4, 9}) {
    SCOPED_TRACE(query_rows);
    append_and_sift({.slots = 4000, .batch = 13, .query_rows = query_rows, .table_stride = 30}, 0, 71);
    append_and_sift({.slots = 4000, .batch = 13, .query_rows = query_rows, .table_stride = 30}, 6, 72);
    append_and_sift({.slots = 4000, .batch = 102, .query_rows = query_rows, .table_stride = 2}, 8, 73);
  }
}

}  // namespace
}  // namespace echo::cuda_test
