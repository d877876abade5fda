// Forecasts on the GPU, beside the pass's stream: which rows, which slots, and that nothing else notices.

#include <map>

#include "cuda_pair.hpp"
#include "cuda_traffic.hpp"

namespace echo::cuda_test {
namespace {

constexpr std::int32_t kTopK = 32;

class CudaForecast : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) {
      return;
    }
    const auto backend = make_cuda_backend(0, own_kernels());
    const World world(*backend, shape_of(RowFormat::raw, IndexKeyFormat::fp8, kTopK), {});
    if (!backend->forecasts()) {
      GTEST_SKIP() << "this device's select leaves nothing for a forecast to look at";
    }
  }
  /// Bytes that tell host rows apart.
  static void fill_slab(World& world) {
    std::mt19937 engine(7);
    std::generate(world.slab.data(), world.slab.data() + world.slab.bytes(),
                  [&] { return static_cast<std::byte>(engine()); });
  }
  /// A step of decoding on these scores: select, recall, forecast, and commit, which joins.
  static void step(World& world, std::int32_t tick, const std::vector<std::int32_t>& positions,
                   const std::vector<float>& scores, std::int32_t cap) {
    world.begin(tick, positions);
    world.scores.write(scores);
    world.select(world.all_rows());
    world.recall(world.all_rows(), true);
    world.forecast(cap);
    world.commit();
  }
  /// Tokens by rank, of a row.
  static std::vector<std::int32_t> ranked(const World& world, const std::vector<float>& scores, std::int32_t row,
                                          std::int32_t length) {
    const float* own = scores.data() + static_cast<std::int64_t>(row) * world.sizes.score_stride();
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(length));
    std::iota(tokens.begin(), tokens.end(), 0);
    std::ranges::stable_sort(tokens, [&](std::int32_t a, std::int32_t b) { return own[a] > own[b]; });
    return tokens;
  }
  /// Positions of an entry whose rows were forecast in this tick.
  static std::vector<std::int32_t> forecast_positions(const World& world, std::int32_t entry, std::int32_t tick) {
    const std::vector<std::int32_t> slot_of = world.slot_of.read();
    const std::vector<std::int32_t> stamps = world.stamp.read();
    std::vector<std::int32_t> found;
    for (std::int32_t position = 0; position < world.sizes.score_stride(); ++position) {
      const std::int32_t slot = slot_of[static_cast<std::size_t>(world.host_row_at(entry, position))];
      if (slot >= 0 && stamps[static_cast<std::size_t>(slot)] == forecast_at(tick)) {
        found.push_back(position);
      }
    }
    return found;
  }
};

TEST_F(CudaForecast, WhatJustMissedIsFetchedAsFarAsThereIsRoom) {
  const Sizes sizes{.slots = 2000, .batch = 3, .table_stride = 40, .forecast_cap = 1000};
  const auto backend = make_cuda_backend(0, own_kernels());
  World world(*backend, shape_of(RowFormat::raw, IndexKeyFormat::fp8, kTopK), sizes);
  fill_slab(world);
  const std::vector<std::int32_t> positions = {2500, kNone, 900};
  const auto scores = normal_floats(static_cast<std::size_t>(3 * sizes.score_stride()), 3);
  step(world, 5, positions, scores, 1000);
  world.check();
  std::int64_t all = 0;
  for (const std::int32_t entry : {0, 1, 2}) {
    const std::vector<std::int32_t> found = forecast_positions(world, entry, 5);
    all += std::ssize(found);
    if (entry == 1) {
      EXPECT_TRUE(found.empty());
      continue;
    }
    std::map<std::int32_t, std::int32_t> rank_of;
    for (const std::int32_t token : ranked(world, scores, entry, positions[static_cast<std::size_t>(entry)] + 1)) {
      rank_of.emplace(token, static_cast<std::int32_t>(rank_of.size()));
    }
    EXPECT_GE(std::ssize(found), 8) << "16 are wanted, as a sample sees them";
    for (const std::int32_t position : found) {
      EXPECT_GE(rank_of[position], kTopK);
      EXPECT_LT(rank_of[position], 3 * kTopK);
    }
  }
  EXPECT_EQ(world.counted().forecast, all);
  EXPECT_EQ(world.counted().evictions, 0);
  // All of them are used in the next step, whose selection they are.
  std::vector<float> next = scores;
  for (const std::int32_t entry : {0, 2}) {
    for (const std::int32_t position : forecast_positions(world, entry, 5)) {
      next[static_cast<std::size_t>(entry * sizes.score_stride() + position)] += 100.0F;
    }
  }
  step(world, 6, positions, next, 0);
  EXPECT_EQ(world.counted().forecast_used, all);
  EXPECT_EQ(world.counted().misses, 2 * kTopK);
  world.check();
}

TEST_F(CudaForecast, TheBestComeFirstUpToTheCapAndReplaceWhatIsFarther) {
  const Sizes sizes{.slots = 4 * kTopK, .batch = 1, .table_stride = 40, .forecast_cap = 6};
  const auto backend = make_cuda_backend(0, own_kernels());
  World world(*backend, shape_of(RowFormat::raw, IndexKeyFormat::fp8, kTopK), sizes);
  fill_slab(world);
  const std::vector<std::int32_t> positions = {2500};
  std::vector<float> scores(static_cast<std::size_t>(sizes.score_stride()));
  // A pool that is full of other tokens first.
  for (std::int32_t tick = 1; tick <= 4; ++tick) {
    for (std::int32_t s = 0; s < sizes.score_stride(); ++s) {
      scores[static_cast<std::size_t>(s)] = s / kTopK == tick ? 1000.0F : -static_cast<float>(s);
    }
    step(world, tick, positions, scores, 0);
  }
  EXPECT_EQ(world.counted().misses, 4 * kTopK);
  for (std::int32_t s = 0; s < sizes.score_stride(); ++s) {
    scores[static_cast<std::size_t>(s)] = static_cast<float>(s);  // ranks 0 to 31: 2500 to 2469
  }
  step(world, 5, positions, scores, 6);
  world.check();
  EXPECT_EQ(forecast_positions(world, 0, 5), (std::vector<std::int32_t>{2463, 2464, 2465, 2466, 2467, 2468}));
  EXPECT_EQ(world.counted().evictions, kTopK + 6);
  step(world, 6, positions, scores, 6);
  EXPECT_EQ(world.counted().misses, 5 * kTopK) << "what was selected stayed";
  const std::vector<std::int32_t> later = forecast_positions(world, 0, 6);
  EXPECT_TRUE(std::ranges::all_of(later, [](std::int32_t position) { return position < 2463; }));
  world.check();
}

TEST_F(CudaForecast, RandomStepsRecallWhatTheCpuRecalls) {
  struct Run {
    Sizes sizes;
    std::int32_t steps;
    bool integers;
  };
  for (const Run& run :
       {Run{{.slots = 4 * 33, .batch = 4, .table_stride = 6, .forecast_cap = 16}, 150, true},
        Run{{.slots = 500, .batch = 3, .query_rows = 2, .table_stride = 12, .forecast_cap = 4}, 150, false},
        Run{{.slots = 3000, .batch = 40, .table_stride = 8, .forecast_cap = 16}, 100, false}}) {
    const Sizes& sizes = run.sizes;
    Pair pair(shape_of(RowFormat::raw, IndexKeyFormat::fp8, kTopK), sizes, own_kernels());
    fill_slab(pair.cpu);
    std::memcpy(pair.gpu.slab.data(), pair.cpu.slab.data(), pair.cpu.slab.bytes());
    std::mt19937 engine(11);
    std::vector<float> worth = normal_floats(static_cast<std::size_t>(sizes.rows() * sizes.score_stride()), 4);
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(sizes.batch), 40);
    for (std::int32_t step_number = 0; step_number < run.steps; ++step_number) {
      const std::vector<std::int32_t> positions = next_positions(sizes, lengths, engine, /*most_more=*/2);
      std::vector<float> scores = normal_floats(worth.size(), engine(), 0.4F);
      for (std::size_t i = 0; i < scores.size(); ++i) {
        scores[i] += worth[i];
        scores[i] = run.integers ? std::round(2.0F * scores[i]) : scores[i];
      }
      const std::int32_t tick = 2 * step_number + 1;
      pair.both([&](World& world) { step(world, tick, positions, scores, sizes.forecast_cap); });
      SCOPED_TRACE(step_number);
      ASSERT_EQ(pair.gpu.recalled_rows(), pair.cpu.recalled_rows());
      pair.expect_same_results();
      if (HasFailure()) {
        return;
      }
    }
    EXPECT_GT(pair.gpu.counted().forecast, 0);
    EXPECT_LT(pair.gpu.counted().misses, 1.3 * static_cast<double>(pair.cpu.counted().misses));
  }
}

TEST_F(CudaForecast, ACapturedStepDoesTheSame) {
  const Sizes sizes{.slots = 400, .batch = 2, .table_stride = 20, .forecast_cap = 16};
  const auto backend = make_cuda_backend(0, own_kernels());
  World world(*backend, shape_of(RowFormat::raw, IndexKeyFormat::fp8, kTopK), sizes);
  fill_slab(world);
  const std::vector<std::int32_t> positions = {1000, 1200};
  world.begin(1, positions);
  const auto replay = backend->capture([&] {
    world.backend.begin({.step = world.step(), .host_blocks = sizes.host_blocks()});
    world.select(world.all_rows());
    world.recall(world.all_rows(), true);
    world.forecast(16);
    world.commit();
  });
  for (std::int32_t tick = 2; tick < 300; ++tick) {
    world.begin(tick, positions);
    world.scores.write(
        normal_floats(static_cast<std::size_t>(2 * sizes.score_stride()), static_cast<unsigned>(tick % 5)));
    replay();
    if (tick % 20 == 0) {
      world.check();
    }
  }
  world.check();
  EXPECT_GT(world.counted().forecast_used, 0);
}

TEST_F(CudaForecast, ACaptureThatFailsLeavesNothingToWaitFor) {
  const Sizes sizes{.slots = 400, .batch = 1, .table_stride = 20, .forecast_cap = 16};
  const auto backend = make_cuda_backend(0, own_kernels());
  World world(*backend, shape_of(RowFormat::raw, IndexKeyFormat::fp8, kTopK), sizes);
  fill_slab(world);
  world.begin(1, {1000});
  const auto failing = [&] {
    world.select(world.all_rows());
    world.recall(world.all_rows(), true);
    world.forecast(16);
    throw std::runtime_error("the model's");
  };
  EXPECT_THROW(static_cast<void>(backend->capture(failing)), std::runtime_error);
  step(world, 2, {1000}, normal_floats(static_cast<std::size_t>(sizes.score_stride()), 1), 16);
  EXPECT_THROW(failing(), std::runtime_error);  // eager: the next call of any kind joins
  world.check();
  EXPECT_THROW(world.forecast(17), InvalidArgument);
}

}  // namespace
}  // namespace echo::cuda_test
