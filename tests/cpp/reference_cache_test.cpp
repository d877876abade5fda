// append, recall and release: the residency state against a plain model, and what may never happen
// to it.

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <set>
#include <string>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"
#include "reference/cache_ops.hpp"
#include "reference_world.hpp"

namespace echo::reference_test {
namespace {

constexpr std::int32_t kTopK = 8;

/// Bytes that tell rows and their versions apart.
std::vector<std::byte> row_pattern(std::int32_t host_row, std::int32_t version, std::size_t bytes) {
  std::vector<std::byte> row(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    row[i] =
        static_cast<std::byte>(static_cast<std::size_t>(host_row * 131 + version * 17) + i * 7);
  }
  return row;
}

bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::ranges::equal(a, b);
}

/// A raw-row layer with verbs, each checked for the invariants afterwards.
class Cache {
 public:
  explicit Cache(const WorldSizes& sizes, std::int64_t threads = 1)
      : world(small_shape(RowFormat::raw, IndexKeyFormat::fp32, kTopK), sizes), backend_(threads) {}

  void append(bool to_slots, std::int32_t version = 0) {
    const auto bytes = static_cast<std::size_t>(row_bytes_of(world.shape));
    std::vector<std::byte> kv;
    for (std::size_t row = 0; row < world.positions.size(); ++row) {
      const auto pattern = row_pattern(host_row_of_pass(row), version, bytes);
      kv.insert(kv.end(), pattern.begin(), pattern.end());
    }
    backend_.append({.layer = world.layer(),
                     .step = world.step(),
                     .shape = world.shape,
                     .kv = kv.data(),
                     .kv_dtype = DType::u8,
                     .index_key = nullptr,
                     .index_key_dtype = DType::f32,
                     .to_slots = to_slots});
    check();
  }

  std::vector<std::int32_t> recall(const std::vector<std::int32_t>& selection) {
    return recall(selection, world.all_rows());
  }
  std::vector<std::int32_t> recall(const std::vector<std::int32_t>& selection, BlockView block) {
    std::vector<std::int32_t> slots(selection.size(), 1 << 30);
    try {
      backend_.recall({.layer = world.layer(),
                       .step = world.step(),
                       .block = block,
                       .shape = world.shape,
                       .selection = selection.data(),
                       .slots = slots.data()});
    } catch (...) {
      check();
      throw;
    }
    check();
    return slots;
  }

  void release(std::vector<RowRun> runs) {
    const LayerView layer = world.layer();
    backend_.release({&layer, 1}, runs);
    check();
  }

  std::int32_t host_row_of_pass(std::size_t row) const {
    const std::int32_t position = world.positions[row];
    return position == kNone
               ? kNone
               : world.host_row_at(static_cast<std::int32_t>(row) / world.sizes.query_rows,
                                   position);
  }

  /// Maps are inverse, stamps and counts fit them, the histogram equals a recount.
  void check() {
    std::int32_t used = 0;
    std::map<std::int32_t, std::int32_t> recount;
    const ReplacementState& state = world.replacement;
    for (std::int32_t slot = 0; slot < world.sizes.slots; ++slot) {
      const std::int32_t row = world.host_of[static_cast<std::size_t>(slot)];
      const std::int32_t stamp = world.stamp[static_cast<std::size_t>(slot)];
      EXPECT_EQ(row == kNone, stamp == kFree) << slot;
      if (row != kNone) {
        EXPECT_EQ(world.slot_of[static_cast<std::size_t>(row)], slot);
        ++used;
      }
      if (stamp != kFree && stamp > state.last_tick - kWindow) {
        ++recount[stamp % kWindow];
      }
    }
    for (std::size_t row = 0; row < world.slot_of.size(); ++row) {
      const std::int32_t slot = world.slot_of[row];
      if (slot != kNone) {
        EXPECT_EQ(world.host_of[static_cast<std::size_t>(slot)], static_cast<std::int32_t>(row));
      }
    }
    for (std::int32_t i = 0; i < kWindow; ++i) {
      EXPECT_EQ(state.recent[i], recount[i]) << i;
    }
    EXPECT_EQ(state.used, used);
  }

  World world;

 private:
  CpuBackend backend_;
};

TEST(CacheOps, AllocatePrefersFreeSlotsThenTheOldest) {
  Cache cache({.slots = 32, .host_blocks = 2});
  CacheOps ops(cache.world.layer());
  std::vector<std::int32_t> rows(32);
  for (std::int32_t tick = 1; tick <= 32; ++tick) {
    ops.begin(tick);
    const std::int32_t row = tick - 1;
    ops.allocate({&row, 1});
    cache.check();
  }
  EXPECT_EQ(cache.world.counters.evictions, 0);
  ops.begin(33);
  ops.protect(cache.world.slot_of[0]);  // the oldest is used again
  const std::int32_t row = 40;
  ops.allocate({&row, 1});
  cache.check();
  EXPECT_EQ(cache.world.counters.evictions, 1);
  EXPECT_NE(cache.world.slot_of[0], kNone);
  EXPECT_TRUE(cache.world.slot_of[1] == kNone || cache.world.slot_of[2] == kNone);
}

TEST(CacheOps, NoRoomChangesNothing) {
  Cache cache({.slots = 4, .host_blocks = 1});
  CacheOps ops(cache.world.layer());
  ops.begin(1);
  const std::vector<std::int32_t> rows = {10, 11, 12};
  ops.allocate(rows);
  const auto before = cache.world.slot_of;
  EXPECT_THROW(ops.allocate(std::vector<std::int32_t>{13, 14}), StateError);
  EXPECT_EQ(cache.world.slot_of, before);
  cache.check();
  ops.allocate(std::vector<std::int32_t>{13});  // exactly full is fine
  ops.begin(2);
  ops.allocate(std::vector<std::int32_t>{20, 21, 22, 23});
  cache.check();
  EXPECT_EQ(cache.world.counters.evictions, 4);
}

TEST(CacheOps, TicksNeverGoBack) {
  Cache cache({});
  CacheOps ops(cache.world.layer());
  EXPECT_THROW(ops.begin(0), StateError);
  ops.begin(5);
  ops.begin(5);
  EXPECT_THROW(ops.begin(4), StateError);
}

TEST(CacheOps, SkippedTicksAgeSlots) {
  Cache cache({.slots = 8, .host_blocks = 1});
  CacheOps ops(cache.world.layer());
  ops.begin(1);
  ops.allocate(std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  ops.begin(1 + 3 * kWindow);  // all fall out of the histogram
  cache.check();
  ops.protect(cache.world.slot_of[3]);
  ops.allocate(std::vector<std::int32_t>{10, 11, 12, 13, 14, 15, 16});
  cache.check();
  EXPECT_NE(cache.world.slot_of[3], kNone);
}

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
    EXPECT_EQ(cache.world.replacement.used, 0);
    EXPECT_EQ(cache.world.replacement.last_tick, 0);
  }
}

TEST(Recall, PaddingRowsChangeNothing) {
  Cache cache({.slots = 18, .batch = 2});
  const std::vector<std::int32_t> slots = cache.recall(std::vector<std::int32_t>(16, 5));
  EXPECT_EQ(slots, std::vector<std::int32_t>(16, kNone));
  EXPECT_EQ(cache.world.replacement.used, 0);
}

TEST(Recall, APoolThatIsTooSmallRefusesAndStaysWhole) {
  Cache cache({.slots = 4, .batch = 1});
  cache.world.positions = {20};
  EXPECT_THROW(cache.recall({0, 1, 2, 3, 4, kNone, kNone, kNone}), StateError);
  EXPECT_EQ(cache.world.replacement.used, 0);
  cache.recall({0, 1, 2, 3, kNone, kNone, kNone, kNone});
  cache.world.tick = 2;
  EXPECT_THROW(cache.recall({3, 4, 5, 6, 7, kNone, kNone, kNone}), StateError);
  cache.recall({3, 4, 5, 6, kNone, kNone, kNone, kNone});
  EXPECT_EQ(cache.world.counters.evictions, 3);
}

TEST(Append, WritesHostRowSlotAndIndexKey) {
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152, RowFormat::fp32}) {
    World world(small_shape(format, IndexKeyFormat::fp8), {.batch = 2, .query_rows = 2});
    world.positions = {63, 64, kNone, kNone};
    const auto kv = normal_floats(
        4 * static_cast<std::size_t>(world.shape.latent_dim + world.shape.rope_dim), 1);
    const auto keys = normal_floats(4 * static_cast<std::size_t>(world.shape.index_dim), 2);
    const AppendParams params{.layer = world.layer(),
                              .step = world.step(),
                              .shape = world.shape,
                              .kv = kv.data(),
                              .kv_dtype = DType::f32,
                              .index_key = keys.data(),
                              .index_key_dtype = DType::f32,
                              .to_slots = true};
    CpuBackend(1).append(params);
    EXPECT_EQ(world.counters.appended, 2);
    EXPECT_EQ(world.replacement.used, 2);
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

TEST(Append, AMappedRowKeepsItsSlotAndPrefillUnmapsIt) {
  Cache cache({.batch = 1});
  cache.world.positions = {7};
  cache.append(true, 1);
  const std::int32_t row = cache.host_row_of_pass(0);
  const std::int32_t slot = cache.world.slot_of[static_cast<std::size_t>(row)];
  cache.world.tick = 2;
  cache.append(true, 2);
  EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(row)], slot);
  EXPECT_EQ(cache.world.stamp[static_cast<std::size_t>(slot)], 2);
  EXPECT_TRUE(equal(cache.world.slot_bytes(slot), row_pattern(row, 2, 48)));
  EXPECT_EQ(cache.world.counters.appended, 2);
  cache.append(false, 3);
  EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(row)], kNone);
  EXPECT_EQ(cache.world.replacement.used, 0);
  EXPECT_TRUE(equal(cache.world.host_bytes(row), row_pattern(row, 3, 48)));
  EXPECT_EQ(cache.world.counters.appended, 2);
}

TEST(Append, RefusesBeforeWriting) {
  Cache cache({.slots = 1, .host_blocks = 8, .batch = 2});
  const auto slab = cache.world.slab;
  cache.world.positions = {3, 3};
  EXPECT_THROW(cache.append(true), StateError);  // two rows, one slot
  cache.world.block_table[4] = cache.world.block_table[0];
  EXPECT_THROW(cache.append(false), StateError);  // both to the same host row
  cache.world.block_table[0] = 100;
  EXPECT_THROW(cache.append(false), StateError);
  EXPECT_TRUE(cache.world.slab == slab);
  cache.check();
}

TEST(Release, FreesSlotsAndRefusesWhatIsOutside) {
  Cache cache({.slots = 18, .batch = 1});
  cache.world.positions = {40};
  cache.recall({0, 1, 2, 3, 30, 31, 32, 33});
  const std::int32_t first = cache.world.host_row_at(0, 0);
  cache.release({{first + 1, 2}, {first + 30, 2}, {first + 50, 5}});
  EXPECT_EQ(cache.world.replacement.used, 4);
  EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(first)] == kNone, false);
  EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(first + 31)], kNone);
  EXPECT_THROW(cache.release({{first, 1}, {255, 2}}), InvalidArgument);
  EXPECT_THROW(cache.release({{-1, 2}}), InvalidArgument);
  EXPECT_EQ(cache.world.replacement.used, 4);
}

/// Random decode steps, prefills and releases of three sessions, against a model that only knows
/// which version of each row was written last.
void run_random(std::int64_t threads, std::uint32_t seed, std::vector<std::int32_t>& trace) {
  std::mt19937 engine(seed);
  const auto pick = [&](std::int32_t n) {
    return static_cast<std::int32_t>(engine() % static_cast<unsigned>(n));
  };
  Cache cache(
      {.slots = 3 * 2 * (kTopK + 1) + pick(40), .host_blocks = 12, .batch = 3, .query_rows = 2},
      threads);
  World& world = cache.world;
  std::map<std::int32_t, std::int32_t> versions;  // host row -> version
  std::vector<std::int32_t> lengths(3, 0);
  for (std::int32_t round = 0; round < 150; ++round) {
    world.tick += 1 + (pick(20) == 0 ? 200 : 0);
    for (std::size_t entry = 0; entry < 3; ++entry) {
      const auto e = static_cast<std::int32_t>(entry);
      const bool active = pick(4) != 0;
      if (lengths[entry] > 240 || pick(25) == 0) {  // ends; another session takes its rows
        std::vector<RowRun> runs;
        for (std::int32_t block = 0; block < 4; ++block) {
          runs.push_back({world.host_row_at(e, block * 64), 64});
        }
        cache.release(runs);
        lengths[entry] = 0;
      }
      for (std::int32_t i = 0; i < 2; ++i) {
        world.positions[entry * 2 + static_cast<std::size_t>(i)] =
            active ? lengths[entry] + i : kNone;
      }
      lengths[entry] += active ? 2 : 0;
    }
    for (std::size_t row = 0; row < 6; ++row) {
      if (world.positions[row] != kNone) {
        versions[cache.host_row_of_pass(row)] = round;
      }
    }
    cache.append(pick(3) != 0, round);
    std::vector<std::int32_t> selection(6 * kTopK, kNone);
    for (std::size_t row = 0; row < 6; ++row) {
      for (std::size_t j = 0; j < kTopK && world.positions[row] != kNone; ++j) {
        selection[row * kTopK + j] = pick(8) == 0 ? kNone : pick(world.positions[row] + 1);
      }
    }
    const std::vector<std::int32_t> slots = cache.recall(selection);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      ASSERT_EQ(slots[i] == kNone, selection[i] == kNone);
      if (slots[i] != kNone) {
        // Nothing that this tick uses was evicted, and the bytes are the last that were written.
        const std::int32_t row =
            world.host_row_at(static_cast<std::int32_t>(i) / (2 * kTopK), selection[i]);
        ASSERT_EQ(world.slot_of[static_cast<std::size_t>(row)], slots[i]);
        ASSERT_EQ(world.stamp[static_cast<std::size_t>(slots[i])], world.tick);
        ASSERT_TRUE(equal(world.slot_bytes(slots[i]), row_pattern(row, versions.at(row), 48)));
      }
    }
    trace.insert(trace.end(), slots.begin(), slots.end());
  }
  for (const std::int64_t count :
       {world.counters.hits, world.counters.misses, world.counters.evictions}) {
    EXPECT_GT(count, 0);
    trace.push_back(static_cast<std::int32_t>(count));
  }
}

TEST(Cache, RandomOperationsAgainstAModel) {
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    std::vector<std::int32_t> one;
    std::vector<std::int32_t> four;
    run_random(1, seed, one);
    run_random(4, seed, four);
    EXPECT_EQ(one, four) << "the state depends on the number of threads";
  }
}

TEST(Cache, BlocksOfOnePassHaveTicksOfTheirOwn) {
  Cache cache({.slots = kTopK + 1, .batch = 1, .query_rows = 4});
  cache.world.positions = {200, 201, 202, 203};
  for (std::int32_t block = 0; block < 4; ++block) {
    std::vector<std::int32_t> selection(kTopK);
    for (std::int32_t j = 0; j < kTopK; ++j) {
      selection[static_cast<std::size_t>(j)] = block * 50 + j;
    }
    const auto slots = cache.recall(selection, {.first = block, .count = 1, .tick_offset = block});
    EXPECT_EQ(std::set<std::int32_t>(slots.begin(), slots.end()).size(),
              static_cast<std::size_t>(kTopK));
  }
}

}  // namespace
}  // namespace echo::reference_test
