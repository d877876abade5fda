// Prefetching on the CPU: which rows, into which slots, how many, and what becomes of them.

#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <vector>

#include "kernels/number_formats.hpp"
#include "reference/cache_ops.hpp"
#include "reference/new_rows.hpp"
#include "reference_sift.hpp"

namespace echo::reference_test {
namespace {

/// 3,000 tokens of one session; the ten best at positions 100, 200, ... 1000, the best last.
class Prefetch : public ::testing::Test {
 protected:
  void make(std::int32_t slots, std::int32_t query_rows = 1) {
    std::vector<std::int32_t> positions(static_cast<std::size_t>(query_rows));
    std::iota(positions.begin(), positions.end(), 2999 - query_rows + 1);
    sifted.emplace(WorldSizes{.slots = slots, .host_blocks = 64, .query_rows = query_rows, .table_stride = 64},
                   positions);
    for (std::size_t i = 0; i < positions.size(); ++i) {
      fill_distinct(sifted->row(i), 1.0F);
      for (std::size_t best = 1; best <= 10; ++best) {
        sifted->row(i)[best * 100] = 8.0F + static_cast<float>(best);
      }
    }
    sifted->bound(0, 1.98F, 1.99F);
    world().tick = 100;
  }
  World& world() { return sifted->world(); }
  const LayerCounters& counters() { return world().counters; }
  /// A row that was selected in some tick.
  void occupy(std::int32_t position, std::int32_t tick) {
    const LayerView layer = world().layer();
    CacheOps ops(layer);
    ops.begin(tick);
    const std::int32_t row = sifted->host_row(position);
    ops.allocate({&row, 1});
  }
  std::vector<std::int32_t> prefetched_positions() {
    std::vector<std::int32_t> found;
    for (std::int32_t position = 0; position < 3000; ++position) {
      const std::int32_t slot = sifted->slot(position);
      if (slot != kNone && world().stamp[static_cast<std::size_t>(slot)] == prefetched_at(world().tick)) {
        EXPECT_TRUE(equal(sifted->cache.world.slot_bytes(slot), world().host_bytes(sifted->host_row(position))));
        found.push_back(position);
      }
    }
    return found;
  }

  std::optional<Sifted> sifted;
};

TEST_F(Prefetch, FetchesWhatLiesAboveTheUpperBound) {
  make(64);
  occupy(300, 99);
  sifted->sift(kAll);
  std::vector<std::int32_t> expected;
  for (std::int32_t s = 0; s < 2999; ++s) {
    if (ordered_key(sifted->row(0)[static_cast<std::size_t>(s)]) >= sifted->sifts()[0].prefetch && s != 300) {
      expected.push_back(s);
    }
  }
  ASSERT_TRUE(expected.size() >= 9 && expected.size() < 60) << expected.size();
  EXPECT_EQ(prefetched_positions(), expected);
  EXPECT_EQ(counters().prefetched, std::ssize(expected));
  EXPECT_EQ(sifted->prefetched[0], std::ssize(expected));
  EXPECT_EQ(counters().prefetches_capped, 0);
  EXPECT_EQ(counters().misses + counters().evictions, 0);
  EXPECT_EQ(world().stamp[static_cast<std::size_t>(sifted->slot(300))], 99);  // not used yet
}

TEST_F(Prefetch, TheCapIsAShareOfAllScoredTokens) {
  make(64);
  sifted->sift(kAll);
  const std::vector<std::int32_t> all = prefetched_positions();
  ASSERT_GT(all.size(), 3U);
  for (const std::int32_t most : {0, 1, 3}) {
    make(64);
    sifted->sift(static_cast<float>(most) / 3000.0F * 1.0001F);
    EXPECT_EQ(prefetched_positions(), std::vector<std::int32_t>(all.begin(), all.begin() + most)) << "in order";
    EXPECT_EQ(counters().prefetched, most);
    EXPECT_EQ(counters().prefetches_capped, most == 0 ? 0 : std::ssize(all) - most) << "0 asks for none";
  }
  make(64, /*query_rows=*/2);
  sifted->sift(5.0F / 5999.0F * 1.0001F);
  EXPECT_EQ(counters().prefetched, 5) << "of both rows";
}

TEST_F(Prefetch, RowsThatThePassAppendsHaveSlotsAndAreNotReadFromTheHost) {
  make(64, /*query_rows=*/2);
  const LayerView layer = world().layer();
  ThreadPool pool(1);
  claim_new_rows(pool, {.step = world().step(), .host_blocks = 64, .layers = {&layer, 1}});
  for (std::size_t i = 0; i < 2; ++i) {
    sifted->row(i).back() = 30.0F;
    sifted->row(i)[2998] = 31.0F;  // that of the first row, which the second sees, too
  }
  sifted->sift(kAll);
  for (const std::int32_t position : {2998, 2999}) {
    EXPECT_EQ(world().stamp[static_cast<std::size_t>(sifted->slot(position))], world().tick);
  }
  EXPECT_GT(counters().prefetched, 0);
  EXPECT_EQ(counters().prefetched, std::ssize(prefetched_positions())) << "both rows want them, once each";
}

TEST_F(Prefetch, TakesNoSlotThatIsInUseOrMayBeSelected) {
  make(12);
  // The pool is full: rows above the bound of prefetch, rows of this tick, and four others.
  for (const std::int32_t position : {1000, 900, 800}) {
    occupy(position, 50);
  }
  for (std::int32_t position = 11; position < 16; ++position) {
    occupy(position, 100);
  }
  for (std::int32_t position = 21; position < 25; ++position) {
    occupy(position, 99);
  }
  ASSERT_EQ(world().replacement.free, 0);
  sifted->sift(kAll);
  EXPECT_EQ(std::ssize(prefetched_positions()), 4) << "as many as there is room for";
  EXPECT_EQ(counters().evictions, 4);
  EXPECT_EQ(counters().prefetched, 4);
  for (const std::int32_t position : {1000, 900, 800, 11, 12, 13, 14, 15}) {
    EXPECT_NE(sifted->slot(position), kNone) << position;
  }
  // A call that needs all of them finds them: guesses are given away in the tick that fetched them.
  std::vector<std::int32_t> selection = {31, 32, 33, 34, 35, 36, 37, kNone};
  sifted->cache.recall(selection);
  EXPECT_EQ(counters().misses, 7);
  EXPECT_EQ(counters().prefetched_used, 0);
}

TEST_F(Prefetch, WhatIsSelectedInTheSameTickIsAHitAndCountedAsUsed) {
  make(64);
  sifted->sift(kAll);
  const std::vector<std::int32_t> found = prefetched_positions();
  ASSERT_GE(found.size(), 3U);
  const std::vector<std::int32_t> selection = {5, 6, found[0], found[2], kNone, kNone, kNone, kNone};
  std::vector<std::int32_t> sorted = selection;
  sifted->cache.recall(sorted);
  EXPECT_EQ(counters().hits, 2);
  EXPECT_EQ(counters().misses, 2);
  EXPECT_EQ(counters().prefetched_used, 2);
  EXPECT_EQ(world().stamp[static_cast<std::size_t>(sifted->slot(found[0]))], 100);
  sifted->cache.recall(sorted);
  EXPECT_EQ(counters().prefetched_used, 2) << "once";
  ++world().tick;
  sifted->cache.recall({found[1], kNone, kNone, kNone, kNone, kNone, kNone, kNone});
  EXPECT_EQ(counters().prefetched_used, 2) << "of an earlier tick";
  EXPECT_EQ(counters().hits, 2 + 4 + 1);
}

TEST(Replacement, GuessesCountAsOlder) {
  EXPECT_EQ(age_of(90, 100), 10);
  EXPECT_EQ(age_of(prefetched_at(90), 100), 10 + kUnusedAge);
  EXPECT_EQ(age_of(prefetched_at(100), 100), kUnusedAge);
  EXPECT_LT(prefetched_at(1), kFree);
  EXPECT_EQ(age_of(prefetched_at(kLastTick), kLastTick), kUnusedAge);
  EXPECT_EQ(age_of(forecast_at(98), 100), 2) << "its chance is yet to come";
  EXPECT_EQ(age_of(forecast_at(96), 100), 4 + kUnusedAge);
  for (const std::int32_t tick : {1, 2, kLastTick}) {
    EXPECT_TRUE(is_forecast(forecast_at(tick)) && !is_forecast(prefetched_at(tick)) && !is_forecast(tick)) << tick;
    EXPECT_EQ(fetched_at(forecast_at(tick)), tick);
    EXPECT_EQ(fetched_at(prefetched_at(tick)), tick);
    EXPECT_LT(forecast_at(tick), kFree);
  }
  EXPECT_FALSE(is_forecast(kFree) || is_forecast(new_row_at(kLastTick)));
}

}  // namespace
}  // namespace echo::reference_test
