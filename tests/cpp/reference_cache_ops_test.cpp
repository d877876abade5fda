// allocate, protect and release, and random passes against a plain model.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "echo/errors.hpp"
#include "reference/cache_ops.hpp"
#include "reference_cache.hpp"

namespace echo::reference_test {
namespace {

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

TEST(CacheOps, VictimsAreAmongTheOldest) {
  const std::int32_t slots = 4 * kSpread;
  Cache cache({.slots = slots, .host_blocks = 2});
  CacheOps ops(cache.world.layer());
  for (std::int32_t row = 0; row < slots; ++row) {
    ops.begin(1 + row);
    ops.allocate({&row, 1});
  }
  for (std::int32_t row = 0; row < slots / 2; ++row) {  // the hand points at slots that are used again
    ops.begin(1 + slots + row);
    ops.protect(ops.lookup(row));
  }
  ops.begin(2 * slots + 1);
  const std::int32_t row = slots;
  ops.allocate({&row, 1});
  std::vector<std::int32_t> evicted;
  for (std::int32_t old = 0; old < slots; ++old) {
    if (ops.lookup(old) == kNone) {
      evicted.push_back(old);
    }
  }
  ASSERT_EQ(evicted.size(), 1U);
  EXPECT_GE(evicted[0], slots / 2);
  EXPECT_LT(evicted[0], slots / 2 + slots / kSpread);
}

TEST(CacheOps, StampsAtOddsWithTheHistogramAreReported) {
  Cache cache({.slots = 4, .host_blocks = 1});
  CacheOps ops(cache.world.layer());
  ops.begin(2);
  std::ranges::fill(cache.world.stamp, 2);
  EXPECT_THROW(ops.allocate(std::vector<std::int32_t>{0}), StateError);
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

/// Random decode steps, prefills and releases of three sessions, against a model that only knows
/// which version of each row was written last.
void run_random(std::int64_t threads, std::uint32_t seed, std::vector<std::int32_t>& trace) {
  std::mt19937 engine(seed);
  const auto pick = [&](std::int32_t n) { return static_cast<std::int32_t>(engine() % static_cast<unsigned>(n)); };
  Cache cache({.slots = 3 * 2 * (kTopK + 1) + pick(40), .host_blocks = 12, .batch = 3, .query_rows = 2}, threads);
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
        world.positions[entry * 2 + static_cast<std::size_t>(i)] = active ? lengths[entry] + i : kNone;
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
        const std::int32_t row = world.host_row_at(static_cast<std::int32_t>(i) / (2 * kTopK), selection[i]);
        ASSERT_EQ(world.slot_of[static_cast<std::size_t>(row)], slots[i]);
        ASSERT_EQ(world.stamp[static_cast<std::size_t>(slots[i])], world.tick);
        ASSERT_TRUE(equal(world.slot_bytes(slots[i]), row_pattern(row, versions.at(row), 48)));
      }
    }
    trace.insert(trace.end(), slots.begin(), slots.end());
  }
  for (const std::int64_t count : {world.counters.hits, world.counters.misses, world.counters.evictions}) {
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

}  // namespace
}  // namespace echo::reference_test
