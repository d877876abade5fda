// Forecasts on the CPU: which rows, into which slots, how many, and what becomes of them.

#include "reference/forecast.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/number_formats.hpp"
#include "reference/cache_ops.hpp"
#include "reference/new_rows.hpp"
#include "reference_sift.hpp"

namespace echo::reference_test {
namespace {

/// 200 tokens of each session, of which position 199 - r has rank r. A forecast looks at ranks 8 to 11: positions 191
/// to 188.
class Forecast : public ::testing::Test {
 protected:
  void make(std::int32_t slots, std::int32_t batch = 1, std::int32_t query_rows = 1) {
    std::vector<std::int32_t> positions;
    for (std::int32_t i = 0; i < batch * query_rows; ++i) {
      positions.push_back(200 - query_rows + i % query_rows);
    }
    sifted.emplace(
        WorldSizes{
            .slots = slots, .host_blocks = 4 * batch, .batch = batch, .query_rows = query_rows, .table_stride = 4},
        positions);
    world().tick = 100;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      for (std::size_t s = 0; s < sifted->row(i).size(); ++s) {
        sifted->row(i)[s] = static_cast<float>(s);
      }
    }
  }
  World& world() { return sifted->world(); }
  const LayerCounters& counters() { return world().counters; }
  std::int32_t slot(std::int32_t position, std::int32_t entry = 0) {
    return world().slot_of[static_cast<std::size_t>(world().host_row_at(entry, position))];
  }
  /// Rows that were selected in some tick.
  void occupy(std::vector<std::int32_t> positions, std::int32_t tick) {
    const LayerView layer = world().layer();
    CacheOps ops(layer);
    ops.begin(tick);
    std::ranges::transform(positions, positions.begin(), [&](std::int32_t p) { return world().host_row_at(0, p); });
    ops.allocate(positions);
  }
  void forecast(std::int32_t cap = 1000) {
    const auto [selection, kth] = sifted->select(false);
    ThreadPool pool(2);
    forecast_rows(pool, {.layer = world().layer(),
                         .step = world().step(),
                         .block = world().all_rows(),
                         .shape = world().shape,
                         .index = 0,
                         .scores = sifted->scores.data(),
                         .score_stride = static_cast<std::int64_t>(sifted->stride()),
                         .kth_score = kth.data(),
                         .cap = cap});
    sifted->cache.check();
  }
  /// What was forecast in this tick, in order of position.
  std::vector<std::int32_t> found(std::int32_t entry = 0) {
    std::vector<std::int32_t> positions;
    for (std::int32_t position = 0; position < 200; ++position) {
      const std::int32_t at = slot(position, entry);
      if (at != kNone && world().stamp[static_cast<std::size_t>(at)] == forecast_at(world().tick)) {
        EXPECT_TRUE(equal(world().slot_bytes(at), world().host_bytes(world().host_row_at(entry, position))));
        positions.push_back(position);
      }
    }
    return positions;
  }
  using Positions = std::vector<std::int32_t>;

  std::optional<Sifted> sifted;
};

TEST_F(Forecast, FetchesTheBestThatJustMissed) {
  ASSERT_EQ(forecast_reach(kTopK), 4);
  make(64);
  forecast();
  EXPECT_EQ(found(), (Positions{188, 189, 190, 191}));
  EXPECT_EQ(counters().forecast, 4);
  EXPECT_EQ(counters().prefetched + counters().misses + counters().evictions, 0);
  make(64);
  occupy({190}, 99);
  forecast(2);
  EXPECT_EQ(found(), (Positions{189, 191}));
  EXPECT_EQ(world().stamp[static_cast<std::size_t>(slot(190))], 99) << "it was not used";
}

TEST_F(Forecast, EqualScoresAreRankedAsSelectRanksThem) {
  make(64);
  std::fill_n(sifted->row(0).begin() + 20, 100, 500.0F);
  forecast();
  EXPECT_EQ(found(), (Positions{28, 29, 30, 31})) << "20 to 27 are selected";
}

TEST_F(Forecast, TakesSlotsOfWhatIsFartherFromBeingSelected) {
  make(9);
  occupy({195, 196, 197}, 100);  // in use
  occupy({191, 190, 150}, 99);
  occupy({20, 10}, 98);
  occupy({187}, 1);
  ASSERT_EQ(world().replacement.free, 0);
  forecast();
  EXPECT_EQ(found(), (Positions{188, 189}));
  EXPECT_EQ(counters().evictions, 2);
  for (const std::int32_t position : {195, 196, 197, 191, 190, 150, 187}) {
    EXPECT_NE(slot(position), kNone) << position;
  }
  ++world().tick;
  forecast();
  EXPECT_EQ(counters().forecast, 2) << "nothing is missing any more";
}

TEST_F(Forecast, EquallyFarRowsDoNotReplaceEachOther) {
  make(9);
  std::fill_n(sifted->row(0).begin(), 192, 0.0F);
  occupy({50, 51, 52, 53, 54, 55, 56, 57, 58}, 50);
  forecast();
  EXPECT_EQ(found(), Positions{});
}

TEST_F(Forecast, OfAFullPoolTheBestOfAllEntriesComeFirst) {
  make(5, /*batch=*/3);
  forecast();
  EXPECT_EQ(found(0), (Positions{190, 191}));
  EXPECT_EQ(found(1), (Positions{190, 191}));
  EXPECT_EQ(found(2), (Positions{191}));
  EXPECT_EQ(counters().forecast, 5);
  EXPECT_EQ(counters().evictions, 0);
}

TEST_F(Forecast, TheLastRowOfAnEntrySpeaksForIt) {
  make(64, /*batch=*/1, /*query_rows=*/2);
  std::ranges::reverse(sifted->row(0));
  forecast();
  EXPECT_EQ(found(), (Positions{188, 189, 190, 191}));
}

TEST_F(Forecast, RowsThatThePassAppendsHaveSlotsAndAreNotReadFromTheHost) {
  make(64, /*batch=*/1, /*query_rows=*/2);
  const LayerView layer = world().layer();
  ThreadPool pool(1);
  claim_new_rows(pool, {.step = world().step(), .host_blocks = 4, .layers = {&layer, 1}});
  sifted->row(1)[198] = 190.5F;
  sifted->row(1)[199] = 189.5F;
  forecast();
  EXPECT_EQ(found(), (Positions{188, 189, 190})) << "198 is selected, 199 ranks between 190 and 189";
}

TEST_F(Forecast, NothingIsForecastWithoutAKthScore) {
  make(64, /*batch=*/3);
  world().positions[0] = kNone;
  world().session[0] = kNone;
  world().positions[1] = 7;  // all are selected
  std::fill_n(sifted->row(2).begin(), 200, kQuietNan);
  forecast();
  for (const std::int32_t entry : {0, 1, 2}) {
    EXPECT_EQ(found(entry), Positions{});
  }
  make(64, /*batch=*/2);
  std::fill_n(sifted->row(0).begin(), 190, -kInf);
  std::fill_n(sifted->row(1).begin(), 200, kInf);
  forecast();
  EXPECT_EQ(found(0), (Positions{190, 191})) << "what is not finite is left out";
  EXPECT_EQ(found(1), Positions{});
}

TEST_F(Forecast, WhatIsSelectedLaterIsAHitAndCountedAsUsedOnce) {
  make(64);
  forecast();
  world().tick += 2;
  const std::vector<std::int32_t> selection = {5, 190, 191, kNone, kNone, kNone, kNone, kNone};
  sifted->cache.recall(selection);
  EXPECT_EQ(counters().hits, 2);
  EXPECT_EQ(counters().misses, 1);
  EXPECT_EQ(counters().forecast_used, 2);
  EXPECT_EQ(counters().prefetched_used, 0);
  ++world().tick;
  sifted->cache.recall(selection);
  EXPECT_EQ(counters().forecast_used, 2);
}

}  // namespace
}  // namespace echo::reference_test
