// What a backend does besides the layer verbs: memory, copies, predictions, replay.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "echo/errors.hpp"
#include "kernels/prediction.hpp"
#include "reference_world.hpp"
#include "runtime/backends.hpp"

namespace echo::reference_test {
namespace {

constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(CpuBackend, MemoryIsAlignedAndRefusedWhereThereIsNone) {
  const auto backend = make_cpu_backend(1);
  EXPECT_EQ(backend->device(), "cpu");
  for (MemoryResource* memory : {&backend->device_memory(), &backend->host_memory()}) {
    for (const std::size_t bytes : {1U, 255U, 256U, 257U, 100000U}) {
      const Buffer buffer(*memory, bytes, "test");
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
      EXPECT_EQ(buffer.device(), buffer.data());
    }
    for (const std::size_t bytes : {std::numeric_limits<std::size_t>::max(), std::size_t{1} << 63}) {
      try {
        memory->allocate(bytes, "slots");
        FAIL();
      } catch (const CapacityError& error) {
        EXPECT_EQ(std::string(error.what()).rfind("slots", 0), 0U) << error.what();
      }
    }
  }
}

TEST(CpuBackend, CopiesAndFills) {
  const auto backend = make_cpu_backend(2);
  const Buffer buffer(backend->device_memory(), 64, "test");
  const std::vector<std::int32_t> values = {1, 2, 3, 4};
  std::vector<std::int32_t> back(4);
  backend->fill(buffer.data(), 0xFF, 64);
  backend->copy_to_host(back.data(), buffer.data(), 16);
  EXPECT_EQ(back, std::vector<std::int32_t>(4, -1));
  backend->copy_to_device(buffer.data(), values.data(), 16);
  backend->copy_to_host(back.data(), buffer.data(), 16);
  EXPECT_EQ(back, values);
  backend->upload_control(buffer.data() + 16, values.data() + 1, 8);
  backend->copy_to_host(back.data(), buffer.data() + 16, 8);
  EXPECT_EQ(back[0], 2);
  backend->copy_to_device(nullptr, nullptr, 0);
  backend->fill(nullptr, 0, 0);
  backend->use_stream(7);
  backend->synchronize();
}

TEST(CpuBackend, ReplayRunsTheBodyAgain) {
  const auto backend = make_cpu_backend(1);
  int runs = 0;
  const std::function<void()> replay = backend->capture([&] { ++runs; });
  const int before = runs;
  replay();
  replay();
  EXPECT_EQ(runs, before + 2);
}

TEST(CpuBackend, CommitFoldsKthScoresIntoPredictions) {
  World world(small_shape(RowFormat::fp32, IndexKeyFormat::fp32), {.batch = 2, .query_rows = 3});
  world.session = {1, 1, 1, kNone, kNone, kNone};
  const std::int64_t stride = 7;
  std::vector<float> kth = {4.0F,     8.0F, kInf, 99.0F,    99.0F,    99.0F,    7.0F,  //
                            kUnknown, 2.0F, 5.0F, kUnknown, kUnknown, kUnknown, kUnknown};
  std::vector<float> thresholds = {kUnknown, kUnknown, kUnknown, 6.0F};
  std::vector<float> deviations = {kUnknown, 3.0F, kUnknown, 16.0F};
  const auto commit = [&] {
    CpuBackend(1).commit({.step = world.step(),
                          .layers = 2,
                          .kth_score = kth.data(),
                          .kth_stride = stride,
                          .thresholds = thresholds.data(),
                          .deviations = deviations.data(),
                          .alpha = 0.25F});
  };
  commit();
  EXPECT_TRUE(std::isnan(thresholds[0]) && std::isnan(deviations[0]));
  EXPECT_TRUE(std::isnan(thresholds[1]));
  EXPECT_EQ(deviations[1], 3.0F);
  EXPECT_EQ(thresholds[2], 0.25F * 4.0F + 0.75F * 8.0F);  // 7
  EXPECT_EQ(deviations[2], 4.0F);
  EXPECT_EQ(thresholds[3], 0.25F * (0.25F * 6.0F + 0.75F * 2.0F) + 0.75F * 5.0F);
  EXPECT_EQ(deviations[3], 0.875F * (0.875F * 16.0F + 0.125F * 4.0F) + 0.125F * 2.0F);
  for (const float score : kth) {
    EXPECT_TRUE(std::isnan(score));
  }
  kth[0] = 11.0F;
  commit();
  EXPECT_EQ(thresholds[2], 10.0F);
  EXPECT_EQ(deviations[2], 0.875F * 4.0F + 0.125F * 4.0F);
}

TEST(Prediction, BoundsLieAroundTheAverage) {
  const auto none = [](float threshold, float deviation) {
    const SiftBounds bounds = sift_bounds(threshold, deviation);
    return std::isnan(bounds.candidates) && std::isnan(bounds.prefetch);
  };
  EXPECT_EQ(sift_bounds(8.0F, 2.0F).candidates, 8.0F - kMargin * 2.0F);
  EXPECT_EQ(sift_bounds(8.0F, 2.0F).prefetch, 8.0F);
  EXPECT_EQ(sift_bounds(-1.0F, 0.0F).candidates, -1.0F);
  for (const float odd : {kUnknown, kInf, -kInf}) {
    EXPECT_TRUE(none(odd, 1.0F) && none(1.0F, odd)) << odd;
  }
  EXPECT_TRUE(none(1.0F, -1.0F)) << "no deviation";
  EXPECT_TRUE(none(-3e38F, 3e38F)) << "below all numbers";
  float threshold = 3e38F;
  float deviation = 1.0F;
  observe(-3e38F, 0.5F, threshold, deviation);
  EXPECT_EQ(threshold, 0.0F);
  EXPECT_TRUE(std::isnan(deviation)) << "what is not finite would never be forgotten";
}

TEST(CpuBackend, RefusesImpossibleThreads) {
  EXPECT_THROW(make_cpu_backend(-3), InvalidArgument);
  EXPECT_NO_THROW(make_cpu_backend(0));
}

}  // namespace
}  // namespace echo::reference_test
