// append, recall and release: what they write, count and refuse.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"
#include "reference_cache.hpp"

namespace echo::reference_test {
namespace {

TEST(Recall, FetchesMissesOnceAndKeepsTheOrder) {
  Cache cache({.slots = 18, .batch = 1, .query_rows = 2});
  cache.world.positions = {10, 11};
  for (std::int32_t position = 0; position <= 11; ++position) {
    const std::int32_t row = cache.world.host_row_at(0, position);
    const auto pattern = row_pattern(row, 3, 48);
    std::ranges::copy(pattern, cache.world.host_bytes(row).begin());
  }
  const std::vector<std::int32_t> selection = {0,     kNone, 3, 4, kNone, 9,  10,    kNone,  //
                                               kNone, 3,     4, 5, 9,     11, kNone, 11};
  const std::vector<std::int32_t> slots = cache.recall(selection);
  for (std::size_t i = 0; i < selection.size(); ++i) {
    if (selection[i] == kNone) {
      EXPECT_EQ(slots[i], kNone);
      continue;
    }
    const std::int32_t row = cache.world.host_row_at(0, selection[i]);
    EXPECT_EQ(cache.world.host_of[static_cast<std::size_t>(slots[i])], row);
    EXPECT_TRUE(equal(cache.world.slot_bytes(slots[i]), row_pattern(row, 3, 48)));
  }
  EXPECT_EQ(cache.world.counters.misses, 7);  // 0 3 4 9 10 5 11
  EXPECT_EQ(cache.world.counters.hits, 4);    // 3 4 9 11 again
  EXPECT_EQ(cache.recall(selection), slots);  // a warm recall is a fixed point
  EXPECT_EQ(cache.world.counters.misses, 7);
  EXPECT_EQ(cache.world.counters.hits, 15);
}

TEST(Recall, BadSelectionsChangeNothing) {
  Cache cache({.slots = 18, .batch = 1, .query_rows = 2});
  cache.world.positions = {10, 11};
  for (const std::int32_t bad : {11, 256, -2, std::numeric_limits<std::int32_t>::min(), 1 << 30}) {
    std::vector<std::int32_t> selection(16, kNone);
    selection[8] = 11;  // fine for the second row
    selection[3] = bad;
    try {
      cache.recall(selection);
      FAIL() << bad;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()).rfind("selection", 0), 0U) << error.what();
    }
    EXPECT_THROW(cache.append_and_recall(selection, 1), InvalidArgument);
    EXPECT_EQ(cache.world.counters.appended, 0);
    EXPECT_EQ(cache.world.used(), 0);
  }
}

TEST(Recall, PaddingRowsChangeNothing) {
  Cache cache({.slots = 18, .batch = 2});
  const std::vector<std::int32_t> slots = cache.recall(std::vector<std::int32_t>(16, 5));
  EXPECT_EQ(slots, std::vector<std::int32_t>(16, kNone));
  EXPECT_EQ(cache.world.used(), 0);
}

TEST(Recall, APoolThatIsTooSmallRefusesAndStaysWhole) {
  Cache cache({.slots = 4, .batch = 1});
  cache.world.positions = {20};
  EXPECT_THROW(cache.recall({0, 1, 2, 3, 4, kNone, kNone, kNone}), StateError);
  EXPECT_EQ(cache.world.used(), 0);
  cache.recall({0, 1, 2, 3, kNone, kNone, kNone, kNone});
  cache.world.tick = 2;
  EXPECT_THROW(cache.recall({3, 4, 5, 6, 7, kNone, kNone, kNone}), StateError);
  cache.recall({3, 4, 5, 6, kNone, kNone, kNone, kNone});
  EXPECT_EQ(cache.world.counters.evictions, 3);
}

TEST(Recall, AppendsInTheSameCallLikeOneBefore) {
  for (const bool resident_before : {false, true}) {
    Cache apart({.slots = 40, .batch = 2, .query_rows = 2});
    Cache together({.slots = 40, .batch = 2, .query_rows = 2});
    std::vector<std::int32_t> selection(4 * kTopK, kNone);
    for (std::int32_t j = 0; j < kTopK; ++j) {
      selection[static_cast<std::size_t>(j)] = j;               // all of entry 0, row 0
      selection[static_cast<std::size_t>(kTopK + j)] = 30 - j;  // its own row, and that of the row before
      selection[static_cast<std::size_t>(3 * kTopK + j)] = j;   // entry 1's second row is padding
    }
    for (Cache* cache : {&apart, &together}) {
      cache->world.positions = {29, 30, 64, kNone};
      if (resident_before) {
        cache->begin(/*claims=*/true);
        cache->append(1);
        ++cache->world.tick;
      }
      cache->begin(/*claims=*/true);
    }
    apart.append(2);
    const auto expected = apart.recall(selection);
    EXPECT_EQ(together.append_and_recall(selection, 2), expected);
    EXPECT_EQ(together.world.slot_of, apart.world.slot_of);
    EXPECT_EQ(together.world.stamp, apart.world.stamp);
    EXPECT_EQ(together.world.pool, apart.world.pool);
    EXPECT_EQ(together.world.slab, apart.world.slab);
    const LayerCounters& a = apart.world.counters;
    const LayerCounters& b = together.world.counters;
    EXPECT_EQ(std::tuple(b.hits, b.misses, b.evictions, b.appended),
              std::tuple(a.hits, a.misses, a.evictions, a.appended));
    EXPECT_EQ(b.hits, 2);
    EXPECT_EQ(b.appended, resident_before ? 6 : 3);
    for (const std::size_t row : {0U, 1U, 2U}) {
      const std::int32_t host_row = together.host_row_of_pass(row);
      EXPECT_TRUE(equal(together.world.host_bytes(host_row), row_pattern(host_row, 2, 48)));
    }
  }
}

TEST(Recall, NewRowsAndTheSelectedOnesFitTheLeastPoolTogether) {
  Cache cache({.slots = 2 * (kTopK + 1), .batch = 2});
  std::vector<std::int32_t> selection(2 * kTopK);
  for (std::int32_t tick = 1; tick < 20; ++tick) {
    cache.world.tick = tick;
    cache.world.positions = {100 + tick, 60 + tick};
    for (std::int32_t j = 0; j < 2 * kTopK; ++j) {  // none of them new, none of them there
      selection[static_cast<std::size_t>(j)] = (tick * 11 + j) % 60;
    }
    cache.begin(/*claims=*/true);
    cache.append_and_recall(selection, tick);
    EXPECT_EQ(cache.world.used(), 2 * (kTopK + 1));
  }
  Cache small({.slots = 2 * (kTopK + 1) - 1, .batch = 2});
  small.world.positions = {100, 60};
  small.begin(/*claims=*/true);
  EXPECT_THROW(small.append_and_recall(selection, 1), StateError);
  EXPECT_EQ(small.world.used(), 2);  // the new rows
  EXPECT_EQ(small.world.replacement.hand, 0);
  Cache smallest({.slots = 1, .batch = 2});
  smallest.world.positions = {100, 60};
  EXPECT_THROW(smallest.begin(/*claims=*/true), StateError);
  EXPECT_EQ(smallest.world.used(), 0);
}

TEST(Begin, GivesSlotsToNewRowsInEachOfItsLayers) {
  Cache cache({.slots = 4, .batch = 3});
  World& world = cache.world;
  world.positions = {9, kNone, 200};
  cache.begin();  // a prefill
  EXPECT_EQ(world.used(), 0);
  cache.begin(/*claims=*/true);
  EXPECT_EQ(world.used(), 2);
  const std::int32_t row = cache.host_row_of_pass(0);
  const std::int32_t slot = world.slot_of[static_cast<std::size_t>(row)];
  ASSERT_NE(slot, kNone);
  EXPECT_NE(world.slot_of[static_cast<std::size_t>(cache.host_row_of_pass(2))], kNone);
  // Once more, with others: what is there keeps its slot, and of the others the oldest goes.
  world.tick = 2;
  world.positions = {10, 30, kNone};
  cache.begin(/*claims=*/true);
  world.tick = 3;
  world.positions = {9, 31, kNone};
  cache.begin(/*claims=*/true);
  EXPECT_EQ(world.slot_of[static_cast<std::size_t>(row)], slot);
  EXPECT_EQ(world.stamp[static_cast<std::size_t>(slot)], 3);
  EXPECT_NE(world.slot_of[static_cast<std::size_t>(cache.host_row_of_pass(1))], kNone);
  EXPECT_EQ(world.slot_of[static_cast<std::size_t>(world.host_row_at(2, 200))], kNone);
  EXPECT_EQ(world.counters.evictions, 1);
  EXPECT_EQ(world.counters.appended + world.counters.misses + world.counters.hits, 0);
  // None of them goes in this tick, however much is missing.
  EXPECT_THROW(cache.recall({0,     1,     2,     kNone, kNone, kNone, kNone, kNone, 20,    kNone, kNone, kNone,
                             kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone}),
               StateError);
  EXPECT_EQ(world.slot_of[static_cast<std::size_t>(row)], slot);
}

TEST(Append, RowsAndIndexKeysMayComeApart) {
  World world(small_shape(RowFormat::fp32, IndexKeyFormat::fp32), {.batch = 2});
  world.positions = {5, 70};
  const auto kv = normal_floats(2 * static_cast<std::size_t>(world.shape.latent_dim + world.shape.rope_dim), 1);
  const auto keys = normal_floats(2 * static_cast<std::size_t>(world.shape.index_dim), 2);
  AppendParams params{.layer = world.layer(),
                      .step = world.step(),
                      .shape = world.shape,
                      .kv = nullptr,
                      .kv_dtype = DType::f32,
                      .index_key = keys.data(),
                      .index_key_dtype = DType::f32};
  const auto slab = world.slab;
  CpuBackend(1).append(params);
  EXPECT_TRUE(world.slab == slab);
  EXPECT_EQ(world.used(), 0);
  EXPECT_EQ(world.counters.appended, 0);
  const auto written = world.index_keys;
  EXPECT_GT(std::ranges::count_if(written, [](std::byte byte) { return byte != std::byte{0xFF}; }), 0);
  params.kv = kv.data();
  params.index_key = nullptr;
  CpuBackend(1).append(params);
  EXPECT_TRUE(world.index_keys == written);
  EXPECT_FALSE(world.slab == slab);
  EXPECT_EQ(world.used(), 0);
}

TEST(Append, WritesHostRowSlotAndIndexKey) {
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152, RowFormat::fp32}) {
    World world(small_shape(format, IndexKeyFormat::fp8), {.batch = 2, .query_rows = 2});
    world.positions = {63, 64, kNone, kNone};
    const auto kv = normal_floats(4 * static_cast<std::size_t>(world.shape.latent_dim + world.shape.rope_dim), 1);
    const auto keys = normal_floats(4 * static_cast<std::size_t>(world.shape.index_dim), 2);
    const AppendParams params{.layer = world.layer(),
                              .step = world.step(),
                              .shape = world.shape,
                              .kv = kv.data(),
                              .kv_dtype = DType::f32,
                              .index_key = keys.data(),
                              .index_key_dtype = DType::f32};
    const LayerView layer = world.layer();
    CpuBackend(1).begin({.step = world.step(), .host_blocks = world.sizes.host_blocks, .layers = {&layer, 1}});
    CpuBackend(1).append(params);
    EXPECT_EQ(world.counters.appended, 2);
    EXPECT_EQ(world.used(), 2);
    for (const std::int32_t position : {63, 64}) {
      const std::int32_t row = world.host_row_at(0, position);
      const std::int32_t slot = world.slot_of[static_cast<std::size_t>(row)];
      ASSERT_NE(slot, kNone);
      EXPECT_TRUE(equal(world.slot_bytes(slot), world.host_bytes(row)));
      float scale = 0.0F;
      const std::byte* block = world.index_keys.data() + row / 64 * world.index_block_bytes();
      std::memcpy(&scale, block + 64 * 32 + row % 64 * 4, sizeof scale);
      for (std::int32_t d = 0; d < 32; ++d) {
        const float value = keys[static_cast<std::size_t>((position - 63) * 32 + d)];
        EXPECT_EQ(block[row % 64 * 32 + d], std::byte{to_e4m3(value / scale)});
      }
    }
    // Everything else is still as it was, the gaps between host rows too.
    const auto written = 2 * (static_cast<std::size_t>(row_bytes_of(world.shape)));
    const auto untouched = std::ranges::count(world.slab, std::byte{0xFF});
    EXPECT_GE(untouched, static_cast<std::ptrdiff_t>(world.slab.size() - written));
  }
}

TEST(Append, ARowThatHasASlotIsWrittenToBothPlaces) {
  Cache cache({.batch = 1});
  cache.world.positions = {7};
  cache.append(1);
  const std::int32_t row = cache.host_row_of_pass(0);
  EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(row)], kNone);
  EXPECT_TRUE(equal(cache.world.host_bytes(row), row_pattern(row, 1, 48)));
  EXPECT_EQ(cache.world.counters.appended, 0);
  cache.begin(/*claims=*/true);
  const std::int32_t slot = cache.world.slot_of[static_cast<std::size_t>(row)];
  for (std::int32_t version = 2; version < 4; ++version) {
    cache.world.tick = version;
    cache.begin(/*claims=*/true);
    cache.append(version);
    EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(row)], slot);
    EXPECT_EQ(cache.world.stamp[static_cast<std::size_t>(slot)], version);
    EXPECT_TRUE(equal(cache.world.slot_bytes(slot), row_pattern(row, version, 48)));
    EXPECT_TRUE(equal(cache.world.host_bytes(row), row_pattern(row, version, 48)));
    EXPECT_EQ(cache.world.counters.appended, version - 1);
  }
}

TEST(Append, RefusesBeforeWriting) {
  Cache cache({.slots = 1, .host_blocks = 8, .batch = 2});
  const auto slab = cache.world.slab;
  cache.world.positions = {3, 3};
  cache.world.block_table[4] = cache.world.block_table[0];
  EXPECT_THROW(cache.begin(/*claims=*/true), StateError);
  EXPECT_THROW(cache.append(), StateError);  // both to the same host row
  cache.world.block_table[0] = 100;
  EXPECT_THROW(cache.append(), StateError);
  EXPECT_TRUE(cache.world.slab == slab);
  EXPECT_EQ(cache.world.used(), 0);
}

TEST(Release, FreesSlotsAndRefusesWhatIsOutside) {
  Cache cache({.slots = 18, .batch = 1});
  cache.world.positions = {40};
  cache.recall({0, 1, 2, 3, 30, 31, 32, 33});
  const std::int32_t first = cache.world.host_row_at(0, 0);
  cache.release({{first + 1, 2}, {first + 30, 2}, {first + 50, 5}});
  EXPECT_EQ(cache.world.used(), 4);
  EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(first)] == kNone, false);
  EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(first + 31)], kNone);
  EXPECT_THROW(cache.release({{first, 1}, {255, 2}}), InvalidArgument);
  EXPECT_THROW(cache.release({{-1, 2}}), InvalidArgument);
  EXPECT_EQ(cache.world.used(), 4);
}

TEST(Recall, BlocksOfOnePassHaveTicksOfTheirOwn) {
  Cache cache({.slots = kTopK + 1, .batch = 1, .query_rows = 4});
  cache.world.positions = {200, 201, 202, 203};
  for (std::int32_t block = 0; block < 4; ++block) {
    std::vector<std::int32_t> selection(kTopK);
    for (std::int32_t j = 0; j < kTopK; ++j) {
      selection[static_cast<std::size_t>(j)] = block * 50 + j;
    }
    const auto slots = cache.recall(selection, {.first = block, .count = 1, .tick_offset = block});
    EXPECT_EQ(std::set<std::int32_t>(slots.begin(), slots.end()).size(), static_cast<std::size_t>(kTopK));
  }
}

}  // namespace
}  // namespace echo::reference_test
