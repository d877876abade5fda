// Rows with NaN codes that a prefetch or a forecast brings, and nobody else: attention minds them, as the CPU does.

#include <set>

#include "cuda_attended.hpp"
#include "cuda_host_rows.hpp"
#include "cuda_score_sift_stage.hpp"

namespace echo::cuda_test {
namespace {

constexpr std::int32_t kTopK = 64;
constexpr std::int32_t kOdd = 1;  ///< the batch entry that has NaN codes

class CudaNanCodesAhead : public CudaScoreSift {
 protected:
  static bool noted(const World& world) { return world.replacement.read()[0].nan_codes != 0; }

  /// Positions of the odd entry whose slots have such a stamp.
  static std::set<std::int32_t> ahead(const World& world, std::int32_t stamp) {
    const auto slot_of = world.slot_of.read();
    const auto stamps = world.stamp.read();
    std::set<std::int32_t> found;
    for (std::int32_t position = 0; position < world.sizes.score_stride(); ++position) {
      const std::int32_t slot = slot_of[static_cast<std::size_t>(world.host_row_at(kOdd, position))];
      if (slot >= 0 && stamps[static_cast<std::size_t>(slot)] == stamp) {
        found.insert(position);
      }
    }
    return found;
  }
  /// Spoils the rows of the odd entry that are in the set, or that are not; makes the others sound.
  static void spoil(World& world, HostRows& rows, const std::set<std::int32_t>& positions, bool in_set) {
    for (std::int32_t position = 0; position < world.sizes.score_stride(); ++position) {
      const std::int32_t row = world.host_row_at(kOdd, position);
      rows.mend(row);
      if (positions.contains(position) == in_set) {
        rows.spoil(row);
      }
    }
  }
  /// How many of these are in the odd entry's selection.
  static std::int64_t selected(const World& world, const std::set<std::int32_t>& positions) {
    const auto selection = world.selection.read();
    const auto first = selection.begin() + kOdd * kTopK;
    return std::count_if(first, first + kTopK, [&](std::int32_t position) { return positions.contains(position); });
  }
  /// What attention makes of the last recall, against the CPU: the odd entry's outputs are NaN or not.
  static void expect_like_the_cpu(World& gpu, bool nan) {
    const auto cpu_backend = make_cpu_backend(0);
    World cpu(*cpu_backend, gpu.shape, gpu.sizes);
    cpu.pool.write(gpu.pool.read());
    cpu.slots.write(gpu.slots.read());
    const std::size_t outputs = static_cast<std::size_t>(gpu.shape.query_heads * gpu.shape.latent_dim);
    const auto q = bf16_floats(static_cast<std::size_t>(gpu.sizes.rows() * gpu.shape.query_heads * 576), 82);
    const auto got = attend(gpu, q, DType::f32, DType::f32, gpu.all_rows());
    const auto expected = attend(cpu, q, DType::f32, DType::f32, cpu.all_rows());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::isnan(expected[i]), nan && i / outputs == kOdd) << i;
      ASSERT_EQ(std::isnan(got[i]), std::isnan(expected[i])) << i;
      ASSERT_TRUE(std::isnan(got[i]) || std::abs(got[i] - expected[i]) <= 5e-3F) << i;
    }
  }
};

TEST_F(CudaNanCodesAhead, OfPrefetchedRowsAreMinded) {
  SiftStage stage(fp8_shape(kTopK), {.slots = 4000, .batch = 3, .table_stride = 128}, 83);
  SiftWorld& world = stage.world;
  world.thread_blocks = 6;
  HostRows rows(world);
  spoil(world, rows, {}, false);
  world.begin_sifting(1, rows_behind({8'000, 7'531, 7'000}, 1), /*claims=*/true);
  stage.plain_scores();
  stage.predict(stage.predictions());
  EXPECT_FALSE(noted(world));
  stage.sift(1.0F);
  const auto fetched = ahead(world, prefetched_at(1));
  ASSERT_FALSE(fetched.empty());
  EXPECT_TRUE(noted(world));
  spoil(world, rows, fetched, true);  // what recall brings is sound
  world.select_sifted();
  world.append_and_recall(DeviceArray(world.backend, rows.new_rows()), DType::u8, true);
  world.check();
  ASSERT_GT(selected(world, fetched), 0);
  expect_like_the_cpu(world, true);
}

TEST_F(CudaNanCodesAhead, OfForecastRowsAreMinded) {
  const auto backend = make_cuda_backend(0, own_kernels());
  World world(*backend, fp8_shape(kTopK), {.slots = 2000, .batch = 3, .table_stride = 40, .forecast_cap = 1000});
  HostRows rows(world);
  auto scores = normal_floats(world.scores.size(), 84);
  float* odd = scores.data() + kOdd * world.sizes.score_stride();
  const auto select_and_recall = [&](std::int32_t tick) {
    world.begin(tick, {2500, 2101, 2400});
    world.scores.write(scores);
    world.select(world.all_rows());
    world.recall(world.all_rows(), true);
  };
  select_and_recall(4);  // so that what is selected in the next tick is there, and sound
  world.commit();
  const auto selection = world.selection.read();
  const auto first = selection.begin() + kOdd * kTopK;
  spoil(world, rows, {first, first + kTopK}, false);
  select_and_recall(6);
  EXPECT_FALSE(noted(world));
  world.forecast(1000);
  expect_like_the_cpu(world, false);  // beside the forecast
  world.commit();
  const auto fetched = ahead(world, forecast_at(6));
  ASSERT_FALSE(fetched.empty());
  EXPECT_TRUE(noted(world));
  spoil(world, rows, fetched, true);
  for (const std::int32_t position : fetched) {
    odd[position] += 100.0F;
  }
  select_and_recall(8);
  world.check();
  ASSERT_EQ(selected(world, fetched), std::min<std::int64_t>(std::ssize(fetched), kTopK));
  expect_like_the_cpu(world, true);
}

}  // namespace
}  // namespace echo::cuda_test
