// append, recall and release on the GPU through very many random calls, each of which is checked by kernels: maps,
// stamps, the stack, every slot's bytes and the counters. ECHO_OPERATIONS is the number of calls, all pools together;
// by default there are few. Some calls on the CPU check the checks where there is no GPU.

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "echo/errors.hpp"
#include "echo/runtime_config.hpp"
#include "residency_world.cuh"
#include "runtime/backends.hpp"

namespace echo::residency_test {
namespace {

// name, slots, batch, query rows, top_k, blocks of a session, of them shared, row bytes, tight
constexpr Sizes kPools[] = {
    {"Smallest", 0, 3, 1, 12, 4, 1, 528},
    {"SmallestWithQueryRows", 0, 4, 3, 40, 6, 2, 656},
    {"Spacious", 700, 4, 2, 64, 12, 1, 1152},
    {"LongRows", 120, 2, 1, 24, 3, 0, 4112},
    {"ShortRows", 0, 16, 1, 128, 8, 1, 16},
    {"NoBytes", 0, 8, 2, 100, 8, 3, 0},
    {"SharedPrefix", 0, 32, 1, 64, 8, 6, 32},
    {"Everything", -1, 6, 2, 96, 8, 2, 656},
    {"Tight", 0, 4, 1, 32, 8, 0, 272, true},
    {"TightOfManyBlocks", 0, 16, 1, 128, 8, 0, 16, true},
    {"TightWithQueryRows", 0, 8, 2, 64, 8, 0, 32, true},
};
constexpr Sizes kLargePools[] = {
    {"Prefill", -1, 1, 512, 256, 64, 0, 32},
    {"Large", 0, 64, 1, 256, 16, 2, 32},
    {"LargeAndTight", 0, 64, 1, 256, 16, 0, 16, true},
    // So many entries a thread on 132 multiprocessors (recall.cu).
    {"FourEntriesPerThread", 0, 102, 1, 2048, 40, 0, 16},
    {"EightEntriesPerThread", 0, 140, 1, 2048, 40, 0, 16, true},
};
constexpr std::int64_t kPoolCount = std::ssize(kPools) + std::ssize(kLargePools);

/// Fewer where the checks of a call take long.
std::int64_t calls_of(const Sizes& sizes) {
  constexpr std::int64_t kLarge = 1 << 15;
  const char* text = std::getenv("ECHO_OPERATIONS");
  const std::int64_t of_each = (text == nullptr ? 100 * kPoolCount : std::atoll(text)) / kPoolCount;
  return std::max<std::int64_t>(of_each * kLarge / std::max<std::int64_t>(sizes.pool(), kLarge), 1);
}

/// A pass: new rows with the recall or before it, with slots or as in a prefill; then perhaps the same recall again, or
/// another, and a release. Or it fails right after its begin.
void run_pass(World& world, bool tight) {
  std::mt19937& engine = world.engine();
  const auto way = engine() % 8;
  world.begin_pass(/*padding=*/!tight, /*claims=*/way > 1);
  if (way == 2) {
    world.fail_pass();
    return;
  }
  world.draw(tight ? Taste::turnover : static_cast<Taste>(engine() % kTastes));
  const bool scored = engine() % 2 == 0;
  const std::int32_t offset = way < 5 ? static_cast<std::int32_t>(engine() % 2) : 0;
  if (way < 5) {
    world.append();
  }
  world.recall(/*appends=*/way >= 5, scored, offset);
  if (engine() % 4 == 0) {
    world.recall(/*appends=*/false, scored, offset, /*warm=*/true);
  }
  if (engine() % 8 == 0) {
    world.draw(Taste::anywhere);
    world.recall(/*appends=*/false, scored, World::kMostOffset);
  }
  if (engine() % 8 == 0) {
    world.release_some();
  }
}

void run_passes(World& world, bool tight, std::int64_t calls) {
  constexpr int kUnchecked = 64;  // passes between two looks at what was found
  for (int pass = 1; world.calls() < calls; ++pass) {
    run_pass(world, tight);
    if (pass % kUnchecked == 0 && !world.whole()) {
      return;
    }
  }
  if (world.whole()) {
    world.check_host_rows();
  }
}

std::string name_of_pool(const ::testing::TestParamInfo<Sizes>& pool) { return pool.param.name; }

class ResidencyOnTheCpu : public ::testing::TestWithParam<Sizes> {};

TEST_P(ResidencyOnTheCpu, RandomCallsLeaveTheLayerWhole) {
  World world(make_cpu_backend(1), /*on_gpu=*/false, GetParam());
  run_passes(world, GetParam().tight, 60);
}

INSTANTIATE_TEST_SUITE_P(Pools, ResidencyOnTheCpu, ::testing::ValuesIn(kPools), name_of_pool);

class CudaResidency : public ::testing::TestWithParam<Sizes> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
  static std::unique_ptr<Backend> backend() { return make_cuda_backend(0, RuntimeConfig{}); }
};

TEST_P(CudaResidency, RandomCallsLeaveTheLayerWhole) {
  World world(backend(), /*on_gpu=*/true, GetParam());
  run_passes(world, GetParam().tight, calls_of(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Pools, CudaResidency, ::testing::ValuesIn(kPools), name_of_pool);
INSTANTIATE_TEST_SUITE_P(LargePools, CudaResidency, ::testing::ValuesIn(kLargePools), name_of_pool);

using CudaResidencyFailures = CudaResidency;

/// More is selected than the pool holds beside the new rows. The next pass, which repeats that one with other rows,
/// finds them, whatever the failure left behind.
TEST_P(CudaResidencyFailures, AreReportedAndForgotten) {
  World world(backend(), /*on_gpu=*/true, GetParam());
  for (int round = 0; round < 50; ++round) {
    world.may_fail(true);
    world.begin_pass(/*padding=*/false, /*claims=*/true);
    world.draw(Taste::turnover);
    world.recall(/*appends=*/true, /*scored=*/false);
    EXPECT_THROW(world.synchronize(), StateError) << round;
    world.may_fail(false);
    world.repeat_pass();
    world.draw(Taste::recent);
    world.recall(/*appends=*/true, /*scored=*/false);
    ASSERT_TRUE(world.whole()) << round;
  }
  world.check_host_rows();
}

INSTANTIATE_TEST_SUITE_P(TooSmall, CudaResidencyFailures,
                         ::testing::Values(Sizes{"OneBlock", 70, 2, 1, 64, 8, 0, 64, true},
                                           Sizes{"ManyBlocks", 1500, 16, 1, 128, 8, 0, 16, true}),
                         name_of_pool);

}  // namespace
}  // namespace echo::residency_test
