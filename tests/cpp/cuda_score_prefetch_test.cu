// Prefetches inside score: what is fetched ahead leaves the layer whole, and scores and candidates as they are. Then
// select and recall on top of it.

#include "cache_manager/residency.cuh"
#include "cuda_score_sift_stage.hpp"
#include "kernels/score_groups.cuh"

namespace echo::cuda_test {
namespace {

/// Passes of a few sessions through small pools: score with prefetch, select, recall. Some score is asked for so many
/// rows at least.
void run_passes(const Sizes& sizes, std::int32_t top_k, int passes, unsigned seed, bool shared_prefix,
                std::int32_t thread_blocks = 0, std::int32_t least_asked = 1) {
  SiftStage stage(sift_shape(64, top_k), sizes, seed);
  SiftWorld& world = stage.world;
  world.thread_blocks = thread_blocks > 0 ? thread_blocks : std::max(1, sizes.batch * sizes.table_stride / 60);
  std::mt19937& engine = stage.engine;
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(sizes.batch));
  const auto capacity = static_cast<std::uint32_t>(sizes.score_stride());
  std::ranges::generate(lengths, [&] { return static_cast<std::int32_t>(capacity - engine() % 64); });
  std::vector<std::byte> kv(static_cast<std::size_t>(sizes.rows() * row_bytes_of(world.shape)));
  std::int64_t fetched = 0;
  std::int64_t used = 0;
  std::int32_t asked = 0;
  std::int32_t tick = 0;
  for (int pass = 0; pass < passes; ++pass) {
    SCOPED_TRACE(pass);
    tick += 2 + static_cast<std::int32_t>(engine() % 3);
    for (std::int32_t& length : lengths) {
      length = length + sizes.query_rows > static_cast<std::int32_t>(capacity) ? static_cast<std::int32_t>(capacity / 2)
                                                                               : length + sizes.query_rows;
    }
    auto now = lengths;
    now[engine() % now.size()] = engine() % 4 == 0 ? kNone : now[0];
    world.begin_sifting(tick, rows_behind(now, sizes.query_rows), /*claims=*/true);
    if (shared_prefix) {  // entry 1 has the first third of entry 0's blocks
      auto words = world.control.read();
      const auto table = world.step().block_table - world.control.data();
      for (std::int32_t i = 0; i < sizes.table_stride / 3; ++i) {
        words[static_cast<std::size_t>(table + sizes.table_stride + i)] = words[static_cast<std::size_t>(table + i)];
      }
      world.control.write(words);
    }
    const auto plain = stage.plain_scores();
    auto predictions = stage.predictions(engine() % 3 == 0 ? 1.3F : 1.0F);
    if (engine() % 16 == 0) {
      std::ranges::fill(predictions.thresholds, engine() % 2 == 0 ? -1e30F : 0.0F);
    }
    stage.predict(predictions);
    const LayerCounters before = world.counted();
    const float cap = engine() % 4 == 0 ? 0.001F : 1.0F;
    stage.sift(cap);
    std::int64_t tokens = 0;
    for (const std::int32_t position : world.positions) {
      tokens += position + 1;
    }
    expect_scores(world, plain);
    expect_right_sifts(world);
    world.expect_idle_queue();
    world.check(/*begun=*/true);
    const LayerCounters after = world.counted();
    EXPECT_LE(after.prefetched - before.prefetched, static_cast<std::int64_t>(cap * static_cast<float>(tokens) + 0.5F));
    EXPECT_EQ(world.prefetched.read()[0], after.prefetched - before.prefetched);
    EXPECT_EQ(after.hits, before.hits);
    const auto resident = world.slot_of.read();
    const auto stamps = world.stamp.read();
    for (std::int32_t row = 0; row < sizes.rows(); ++row) {
      if (const std::int32_t position = world.positions[static_cast<std::size_t>(row)]; position != kNone) {
        const auto host = static_cast<std::size_t>(world.host_row_of(row, position));
        ASSERT_GE(resident[host], 0);
        EXPECT_EQ(stamps[static_cast<std::size_t>(resident[host])], new_row_at(tick))
            << "new row " << row << " was fetched";
      }
    }
    ASSERT_FALSE(::testing::Test::HasFailure());

    std::ranges::generate(kv, [&] { return static_cast<std::byte>(engine()); });
    const DeviceArray rows(world.backend, kv);
    world.select_sifted();
    world.append_and_recall(rows, DType::u8, true);
    world.check();
    const auto selection = world.selection.read();
    const auto recalled = world.recalled_rows();
    for (std::int32_t row = 0; row < sizes.rows(); ++row) {
      if (world.positions[static_cast<std::size_t>(row)] != kNone) {
        const auto first = selection.begin() + row * top_k;
        ASSERT_EQ(std::vector<std::int32_t>(first, first + top_k), best_of(world.scores_of(row), top_k)) << row;
      }
    }
    for (std::size_t i = 0; i < selection.size(); ++i) {
      const auto row = static_cast<std::int32_t>(i) / top_k;
      const std::int32_t expected = selection[i] == kNone ? kNone : world.host_row_of(row, selection[i]);
      if (recalled[i] != expected) {
        FAIL() << "entry " << i << ": row " << recalled[i] << ", expected " << expected;
      }
    }
    const LayerCounters last = world.counted();
    EXPECT_LE(last.prefetched_used - after.prefetched_used, after.prefetched - before.prefetched);
    ASSERT_FALSE(::testing::Test::HasFailure());
    fetched = last.prefetched;
    used = last.prefetched_used;
    const ReplacementState state = world.replacement.read()[0];
    EXPECT_EQ(state.expected, state.asked);  // what the next score goes by
    asked = std::max(asked, state.asked);
  }
  const LayerCounters counters = world.counted();
  EXPECT_GT(fetched, 0);
  EXPECT_GT(used, 0);
  if (sizes.query_rows == 1) {  // what is predicted is so for the last one of them
    EXPECT_LT(counters.full_selects, passes * sizes.rows() / 4);
  }
  EXPECT_GE(asked, least_asked);
}

TEST_F(CudaScoreSift, PrefetchIntoASmallPool) {
  run_passes({.slots = 3 * 65, .batch = 3, .query_rows = 1, .table_stride = 128}, 64, 25, 65, false);
}
TEST_F(CudaScoreSift, PrefetchIntoARoomyPool) {
  run_passes({.slots = 4000, .batch = 3, .query_rows = 1, .table_stride = 128}, 64, 25, 66, false);
}
TEST_F(CudaScoreSift, PrefetchForALongTime) {
  run_passes({.slots = 3 * 33 + 20, .batch = 3, .query_rows = 1, .table_stride = 40}, 32, 500, 69, true);
}
TEST_F(CudaScoreSift, PrefetchOfSharedPrefixes) {
  run_passes({.slots = 900, .batch = 4, .query_rows = 1, .table_stride = 96}, 96, 25, 67, true);
}
TEST_F(CudaScoreSift, PrefetchByMoreThreadBlocksWhereMuchIsMissing) {
  constexpr std::int32_t kScorers = 26 - 8;
  run_passes({.slots = 4 * 513 + 20, .batch = 4, .query_rows = 1, .table_stride = 200}, 512, 25, 71, false, 26,
             kMuchMissing * 4 * 200 / kScorers + 1);
}
TEST_F(CudaScoreSift, PrefetchForSpeculation) {
  run_passes({.slots = 2 * 3 * 65 + 10, .batch = 2, .query_rows = 3, .table_stride = 128}, 64, 25, 68, true);
}

/// As many rows as a call can list, there before it begins: of blocks that are no session's, so that nobody else lists
/// them. Each thread block that fetches has its share of them in shared memory at once.
TEST_F(CudaScoreSift, AFullQueueIsFetchedOrGivenUp) {
  SiftStage stage(sift_shape(64, 64), {.slots = 4000, .batch = 3, .query_rows = 1, .table_stride = 128}, 75);
  SiftWorld& world = stage.world;
  for (const std::int32_t thread_blocks : {6, 2}) {  // 2,731 rows for each of three, 8,192 for one
    SCOPED_TRACE(thread_blocks);
    world.thread_blocks = thread_blocks;
    world.begin_sifting(thread_blocks == 6 ? 1 : 3, rows_behind({8'000, 7'000, 6'000}, 1));
    const auto plain = stage.plain_scores();
    stage.predict(stage.predictions());
    stage.poison_scores();
    auto queue = world.queue.read();
    auto slots = world.slot_of.read();
    queue[0].listed = kQueuePlaces;
    std::int32_t listed = 0;
    for (std::int32_t row = 0; listed < kQueuePlaces; row += row % 64 == 63 ? 65 : 1) {  // every other block
      if (slots[static_cast<std::size_t>(row)] == kNone) {
        queue[0].rows[listed++] = {.tag = queue[0].call + 1U, .row = row};
        slots[static_cast<std::size_t>(row)] = kPending;
      }
    }
    world.queue.write(queue);
    world.slot_of.write(slots);
    const std::int64_t before = world.counted().prefetched;
    stage.sift(1.0F);
    expect_scores(world, plain);
    expect_right_sifts(world);
    world.expect_idle_queue();
    world.check();
    EXPECT_EQ(std::ranges::count(world.slot_of.read(), kPending), 0);
    EXPECT_GT(world.counted().prefetched, before);
    ASSERT_FALSE(HasFailure());
  }
}

TEST_F(CudaScoreSift, PrefetchWaitsUntilRowsHaveBeenMissing) {
  const Sizes sizes{.slots = 3 * 65, .batch = 3, .query_rows = 1, .table_stride = 128};
  SiftStage stage(sift_shape(64, 64), sizes, 70);
  SiftWorld& world = stage.world;
  world.thread_blocks = 6;
  const DeviceArray rows(world.backend,
                         std::vector<std::byte>(3U * static_cast<std::size_t>(row_bytes_of(world.shape))));
  std::vector<std::int32_t> lengths(3, 7'000);
  std::int32_t tick = 0;
  // Nothing is resident before the first pass, and predictions ask for more than is selected: rows are always missing.
  for (const std::int32_t later : {kExpectMisses + 1, 2, kExpectMisses + 1}) {
    tick += later;
    SCOPED_TRACE(tick);
    world.begin_sifting(tick, rows_behind(lengths, 1), /*claims=*/true);
    const auto plain = stage.plain_scores();
    stage.predict(stage.predictions(1.3F));
    const std::int64_t before = world.counted().prefetched;
    stage.sift(1.0F);
    EXPECT_EQ(world.counted().prefetched > before, later <= kExpectMisses);
    expect_scores(world, plain);
    EXPECT_EQ(expect_right_sifts(world), 3);
    world.select_sifted();
    world.append_and_recall(rows, DType::u8, true);
    world.check();
    lengths = {lengths[0] + 100, lengths[1] + 60, lengths[2] + 1};
  }
}

}  // namespace
}  // namespace echo::cuda_test
