// append, recall and release on the GPU make the same rows resident as on the CPU, with the same
// bytes, through long random runs.

#include <numeric>
#include <set>

#include "cuda_pair.hpp"
#include "cuda_traffic.hpp"

namespace echo::cuda_test {
namespace {

using CudaRecall = CudaTest;

/// Random selections: entries anywhere up to the row's position, in groups that come back, with
/// gaps and duplicates.
std::vector<std::int32_t> random_selection(const World& world, const std::vector<std::int32_t>& positions,
                                           std::mt19937& engine) {
  std::vector<std::int32_t> selection(world.entries(), kNone);
  for (std::size_t i = 0; i < selection.size(); ++i) {
    const std::int32_t own = positions[i / static_cast<std::size_t>(world.shape.top_k)];
    if (own != kNone && engine() % 8 != 0) {
      const bool recent = engine() % 2 == 0;
      const auto range = static_cast<std::uint32_t>(recent ? std::min(own + 1, 24) : own + 1);
      selection[i] = own - static_cast<std::int32_t>(engine() % range);
    }
  }
  return selection;
}

void fill_slabs(Pair& pair, unsigned seed) {
  std::mt19937 engine(seed);
  std::byte* rows = pair.cpu.slab.data();
  std::generate(rows, rows + pair.cpu.slab.bytes(), [&] { return static_cast<std::byte>(engine()); });
  std::memcpy(pair.gpu.slab.data(), rows, pair.cpu.slab.bytes());
}

void run_random_passes(const Sizes& sizes, int passes, unsigned seed) {
  const ShapeView shape = shape_of(RowFormat::raw, IndexKeyFormat::fp8, 12);
  Pair pair(shape, sizes);
  fill_slabs(pair, seed);
  std::mt19937 engine(seed);
  const auto keys = normal_floats(static_cast<std::size_t>(sizes.rows() * shape.index_dim), seed);
  std::vector<std::byte> kv(static_cast<std::size_t>(sizes.rows() * row_bytes_of(shape)));
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(sizes.batch), 40);
  std::int32_t tick = 0;
  for (int pass = 0; pass < passes; ++pass) {
    tick += 1 + static_cast<std::int32_t>(engine() % 32 == 0 ? engine() % 600 : engine() % 3);
    const std::vector<std::int32_t> positions = next_positions(sizes, lengths, engine);
    std::ranges::generate(kv, [&] { return static_cast<std::byte>(engine()); });
    const auto selection = random_selection(pair.cpu, positions, engine);
    const auto scores = normal_floats(static_cast<std::size_t>(sizes.rows() * sizes.score_stride()), engine());
    const std::vector<float> kth(static_cast<std::size_t>(sizes.rows()), 1.0F);
    const BlockView block{.first = 0, .count = sizes.rows(), .tick_offset = static_cast<std::int32_t>(engine() % 2)};
    const auto first = static_cast<std::int32_t>(engine() % static_cast<unsigned>(pair.cpu.host_rows() - 40));
    const RowRun freed[] = {{first, 30}, {first + 20, 20}};
    const bool together = engine() % 2 == 0;
    const bool scored = engine() % 3 != 0;
    pair.both([&](World& world) {
      world.begin(tick, positions, /*claims=*/true);
      world.selection.write(selection);
      world.scores.write(scores);
      world.kth_score.write(kth);
      const DeviceArray rows(world.backend, kv);
      if (together) {
        world.append_and_recall(rows, DType::u8, scored);
      } else {
        world.append(rows, DType::u8, DeviceArray(world.backend, keys), DType::f32);
        world.recall(block, scored);
      }
      world.backend.synchronize();
    });
    SCOPED_TRACE(pass);
    ASSERT_EQ(pair.gpu.recalled_rows(), pair.cpu.recalled_rows());
    pair.expect_same_results();
    if (together) {
      EXPECT_EQ(pair.gpu.resident_new_rows(positions), pair.cpu.resident_new_rows(positions));
      EXPECT_EQ(pair.gpu.resident_new_rows(positions), sizes.rows() - std::ranges::count(positions, kNone));
    }
    if (engine() % 4 == 0) {
      pair.both([&](World& world) {
        const LayerView layer = world.layer();
        world.backend.release({&layer, 1}, freed);
        for (const std::int32_t row : world.resident_rows()) {
          EXPECT_TRUE(row < first || row >= first + 40) << row;
        }
        world.check();
      });
    }
    if (::testing::Test::HasFailure()) {
      return;
    }
    ++tick;  // the recall may have used the next one
  }
}

TEST_F(CudaRecall, RandomPassesRecallTheSameRowsAsOnTheCpu) {
  run_random_passes({.slots = 3 * 13, .batch = 3, .table_stride = 3}, 60,
                    1);  // the least that works
  run_random_passes({.slots = 200, .batch = 4, .query_rows = 2, .table_stride = 5}, 60, 2);
  run_random_passes({.slots = 5000, .batch = 2, .query_rows = 3, .table_stride = 64}, 40,
                    3);  // many turns' worth
}

TEST_F(CudaRecall, ALargePoolIsUsedUpAndTurnedOver) {
  run_random_passes({.slots = 1024, .batch = 16, .query_rows = 4, .table_stride = 16}, 12, 4);
}

TEST_F(CudaRecall, FetchesDuplicatesOnceAndAWarmRecallIsAFixedPoint) {
  const ShapeView shape = shape_of(RowFormat::raw);
  const Sizes sizes{.slots = 40, .batch = 1, .query_rows = 2};
  Pair pair(shape, sizes);
  fill_slabs(pair, 9);
  std::vector<std::int32_t> selection(pair.cpu.entries(), 7);
  for (std::size_t i = 0; i < selection.size(); i += 2) {
    selection[i] = static_cast<std::int32_t>(i % 6);
  }
  pair.both([&](World& world) {
    world.begin(1, {100, 101});
    world.selection.write(selection);
    world.recall(world.all_rows());
  });
  pair.expect_same_state();
  EXPECT_EQ(pair.gpu.recalled_rows(), pair.cpu.recalled_rows());
  const auto slots = pair.gpu.slots.read();
  EXPECT_EQ(std::set<std::int32_t>(slots.begin(), slots.end()).size(), 4U);  // 0 2 4 7
  pair.gpu.recall(pair.gpu.all_rows());
  EXPECT_EQ(pair.gpu.slots.read(), slots);
  EXPECT_EQ(pair.gpu.counted().hits, 28 + 32);
  EXPECT_EQ(pair.gpu.counted().misses, 4);
}

TEST_F(CudaRecall, ANewRowTakesTheSlotThatWouldHaveGoneNext) {
  const ShapeView shape = shape_of(RowFormat::raw, IndexKeyFormat::fp8, 8);
  Pair pair(shape, {.slots = 64, .batch = 1});
  fill_slabs(pair, 12);
  std::vector<float> scores(static_cast<std::size_t>(pair.cpu.sizes.score_stride()), 0.75F);
  scores[10] = -7.0F;
  scores[50] = -6.5F;
  pair.both([&](World& world) {
    std::vector<std::int32_t> selection(world.entries());
    std::iota(selection.begin(), selection.end(), 0);
    std::int32_t tick = 0;
    for (; tick < 8; ++tick) {
      world.begin(tick + 1, {200});
      world.selection.write(selection);
      world.recall(world.all_rows());
      std::ranges::for_each(selection, [](std::int32_t& position) { position += 8; });
    }
    std::ranges::fill(selection, kNone);
    selection[0] = 100;
    world.scores.write(scores);
    world.kth_score.write({1.0F});
    world.selection.write(selection);
    world.begin(++tick, {200});
    world.recall(world.all_rows(), /*scored=*/true);
    const auto is_there = [&](std::int32_t position) {
      return std::ranges::binary_search(world.resident_rows(), world.host_row_at(0, position));
    };
    EXPECT_FALSE(is_there(10));
    EXPECT_TRUE(is_there(50));
    world.begin(tick + kStepTicks, {150}, /*claims=*/true);  // one block of a GPU leaves one hint
    EXPECT_FALSE(is_there(50));
    world.begin(tick + 2 * kStepTicks, {151}, /*claims=*/true);
    EXPECT_EQ(world.counted().evictions, 3);
  });
}

TEST_F(CudaRecall, RowsFarApartInALargeHostPool) {
  const ShapeView shape = shape_of(RowFormat::raw, IndexKeyFormat::fp8, 64);
  const Sizes sizes{.slots = 4 * 65, .batch = 4, .table_stride = 600};
  Pair pair(shape, sizes);
  fill_slabs(pair, 10);
  std::mt19937 engine(11);
  for (std::int32_t tick = 1; tick <= 8; ++tick) {
    const std::vector<std::int32_t> positions(4, 600 * kTokensPerBlock - 1);
    std::vector<std::int32_t> selection(pair.cpu.entries());
    std::ranges::generate(selection, [&] { return static_cast<std::int32_t>(engine() % (600U * 64U)); });
    pair.both([&](World& world) {
      world.begin(tick, positions);
      world.selection.write(selection);
      world.recall(world.all_rows());
    });
    SCOPED_TRACE(tick);
    ASSERT_EQ(pair.gpu.recalled_rows(), pair.cpu.recalled_rows());
    pair.expect_same_results();
  }
}

TEST_F(CudaRecall, BadEntriesAreLeftOutAndReported) {
  const ShapeView shape = shape_of(RowFormat::raw);
  const Sizes sizes{.batch = 1};
  Pair pair(shape, sizes);
  World& world = pair.gpu;
  std::vector<std::int32_t> selection(world.entries(), kNone);
  selection[0] = 3;
  selection[1] = 11;
  selection[2] = -2;
  selection[3] = 1 << 30;
  world.begin(1, {10});
  world.selection.write(selection);
  world.recall(world.all_rows());
  try {
    world.backend.synchronize();
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()).rfind("selection", 0), 0U) << error.what();
  }
  const auto slots = world.slots.read();
  EXPECT_NE(slots[0], kNone);
  EXPECT_EQ(std::ranges::count(slots, kNone), std::ssize(slots) - 1);
}

TEST_F(CudaRecall, ANewRowInABlockThatIsNoneIsReportedAndNotWaitedFor) {
  const ShapeView shape = shape_of(RowFormat::raw);
  Pair pair(shape, {.batch = 1});
  World& world = pair.gpu;
  const DeviceArray rows(world.backend,
                         std::vector<std::uint8_t>(static_cast<std::size_t>(world.layer().row_bytes), 7));
  world.upload(1, {3});
  std::vector<std::int32_t> words = world.control.read();
  words[words.size() - static_cast<std::size_t>(world.sizes.table_stride)] = 1 << 28;  // the first block of the table
  world.control.write(words);
  const LayerView layer = world.layer();
  world.backend.begin({.step = world.step(), .host_blocks = world.sizes.host_blocks(), .layers = {&layer, 1}});
  world.selection.write(std::vector<std::int32_t>(world.entries(), 3));
  world.append_and_recall(rows, DType::u8, false);
  EXPECT_THROW(world.backend.synchronize(), StateError);
  EXPECT_EQ(world.slots.read(), std::vector<std::int32_t>(world.entries(), kNone));
  world.check();
}

TEST_F(CudaRecall, NewRowsForWhichBeginFindsNoSlotsAreReportedAndBackedUp) {
  const ShapeView shape = shape_of(RowFormat::raw, IndexKeyFormat::fp8, 8);
  Pair pair(shape, {.slots = 2, .batch = 3});
  fill_slabs(pair, 13);
  World& world = pair.gpu;
  std::vector<std::uint8_t> kv(3 * static_cast<std::size_t>(world.layer().row_bytes));
  std::mt19937 engine(14);
  std::ranges::generate(kv, [&] { return static_cast<std::uint8_t>(engine()); });
  const DeviceArray rows(world.backend, kv);
  std::vector<std::int32_t> selection(world.entries(), kNone);
  for (std::size_t row = 0; row < 3; ++row) {
    std::fill_n(selection.begin() + static_cast<std::ptrdiff_t>(row * 8), 4, 20);
  }
  for (std::int32_t tick = 1; tick < 4; ++tick) {
    world.begin(tick, {20, 20, 20}, /*claims=*/true);
    world.selection.write(selection);
    world.append_and_recall(rows, DType::u8, false);
    EXPECT_THROW(world.backend.synchronize(), StateError);
    world.check();
    EXPECT_EQ(world.resident_rows().size(), 2U);
    EXPECT_EQ(std::ranges::count(world.slots.read(), kNone), std::ssize(selection) - 8);
    pair.cpu.begin(tick, {20, 20, 20});
    pair.cpu.selection.write(selection);
    EXPECT_THROW(pair.cpu.append_and_recall(DeviceArray(pair.cpu.backend, kv), DType::u8, false), StateError);
    EXPECT_EQ(world.host_pool(), pair.cpu.host_pool());
    EXPECT_EQ(world.counted().misses, 0);
    EXPECT_EQ(world.counted().appended, 2 * tick);
  }
}

TEST_F(CudaRecall, RowsAtOrAboveTheKthScoreStayWhileOthersAreThere) {
  constexpr std::int32_t kK = 64;
  constexpr std::int32_t kSlots = 1024;
  constexpr std::int32_t kHot = 768;  // whole windows of the pool
  Pair pair(shape_of(RowFormat::raw, IndexKeyFormat::fp8, kK), {.slots = kSlots, .batch = 1, .table_stride = 20});
  fill_slabs(pair, 15);
  World& world = pair.gpu;
  std::vector<float> scores(static_cast<std::size_t>(world.sizes.score_stride()), 2.0F);
  std::fill(scores.begin() + kHot, scores.begin() + kSlots, -1.0F);
  std::vector<std::int32_t> selection(kK);
  const auto recall = [&](std::int32_t tick, std::int32_t first) {
    std::iota(selection.begin(), selection.end(), first);
    world.begin(tick, {20 * kTokensPerBlock - 1});
    world.selection.write(selection);
    world.scores.write(scores);
    world.kth_score.write({2.0F});
    world.recall(world.all_rows(), /*scored=*/true);
  };
  std::int32_t tick = 0;
  std::vector<std::int32_t> hot;
  for (std::int32_t first = 0; first < kSlots; first += kK) {
    recall(++tick, first);
    if (first + kK == kHot) {
      hot = world.resident_rows();
    }
  }
  for (std::int32_t first = kSlots; first < kSlots + 4 * kK; first += kK) {
    recall(++tick, first);
    EXPECT_TRUE(std::ranges::includes(world.resident_rows(), hot)) << first;
  }
  EXPECT_EQ(world.counted().evictions, 4 * kK);
  recall(++tick, kHot);  // nothing else is left
  world.backend.synchronize();
  EXPECT_EQ(world.counted().evictions, 5 * kK);
  world.check();
}

TEST_F(CudaRecall, PaddingRowsChangeNothing) {
  const ShapeView shape = shape_of(RowFormat::raw);
  Pair pair(shape, {.batch = 3});
  World& world = pair.gpu;
  world.begin(1, {kNone, kNone, kNone}, /*claims=*/true);
  world.selection.write(std::vector<std::int32_t>(world.entries(), 5));
  world.recall(world.all_rows());
  EXPECT_EQ(world.slots.read(), std::vector<std::int32_t>(world.entries(), kNone));
  EXPECT_TRUE(world.resident_rows().empty());
  world.check();
}

TEST_F(CudaRecall, APoolThatIsTooSmallIsReportedAndStaysWhole) {
  const ShapeView shape = shape_of(RowFormat::raw, IndexKeyFormat::fp8, 8);
  Pair pair(shape, {.slots = 6, .batch = 1});
  fill_slabs(pair, 12);
  World& world = pair.gpu;
  const auto recall = [&](std::int32_t tick, std::int32_t entries) {
    std::vector<std::int32_t> selection(world.entries(), kNone);
    std::iota(selection.begin(), selection.begin() + entries, 0);
    world.begin(tick, {20});
    world.selection.write(selection);
    world.recall(world.all_rows());
  };
  recall(1, 6);
  world.backend.synchronize();
  recall(2, 8);
  EXPECT_THROW(world.backend.synchronize(), StateError);
  recall(3, 6);  // all that was there is still there
  world.backend.synchronize();
  EXPECT_EQ(world.counted().misses, 6);
  world.check();
}

}  // namespace
}  // namespace echo::cuda_test
