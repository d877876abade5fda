// allocate, protect and release: the replacement rule by hand.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "echo/errors.hpp"
#include "reference/cache_ops.hpp"
#include "reference_cache.hpp"

namespace echo::reference_test {
namespace {

std::vector<std::int32_t> range(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(count));
  std::iota(rows.begin(), rows.end(), first);
  return rows;
}

/// Uses each of the rows at the next tick, one after the other; those without a slot get one.
void use(Cache& cache, const std::vector<std::int32_t>& rows) {
  CacheOps ops(cache.world.layer());
  for (const std::int32_t row : rows) {
    ops.begin(++cache.world.tick);
    if (const std::int32_t slot = ops.lookup(row); slot != kNone) {
      ops.protect(slot);
    } else {
      ops.allocate({&row, 1});
    }
  }
}

/// Gives slots to `rows` in the next tick. Returns the rows that lost theirs.
std::set<std::int32_t> evicted_by(Cache& cache, const std::vector<std::int32_t>& rows, const RowScores& scores = {}) {
  const std::vector<std::int32_t> before = cache.world.slot_of;
  CacheOps ops(cache.world.layer());
  ops.begin(++cache.world.tick);
  ops.allocate(rows, scores);
  cache.check();
  std::set<std::int32_t> gone;
  for (std::size_t row = 0; row < before.size(); ++row) {
    if (before[row] != kNone && cache.world.slot_of[row] == kNone) {
      gone.insert(static_cast<std::int32_t>(row));
    }
  }
  EXPECT_TRUE(std::ranges::none_of(rows, [&](std::int32_t row) { return ops.lookup(row) == kNone; }));
  return gone;
}

/// Likewise for a new row. Returns the row that lost its slot, kNone if there is none.
std::int32_t evicted_by_new(Cache& cache, std::int32_t row) {
  const std::vector<std::int32_t> before = cache.world.host_of;
  CacheOps ops(cache.world.layer());
  ops.begin(++cache.world.tick);
  ops.allocate_new({&row, 1});
  cache.check();
  return before[static_cast<std::size_t>(ops.lookup(row))];
}

/// The last query of the only session sees all tokens; `distances` are below the k-th score 1.
struct ScoredPool {
  ScoredPool(std::int32_t slots, const std::vector<float>& distances)
      : cache({.slots = slots, .host_blocks = 11, .table_stride = 8}), kth(1, 1.0F) {
    cache.world.positions = {static_cast<std::int32_t>(distances.size()) - 1};
    cache.begin();
    for (std::size_t position = 0; position < distances.size(); ++position) {
      values.push_back(kth[0] - distances[position]);
      rows.push_back(cache.world.host_row_at(0, static_cast<std::int32_t>(position)));
    }
  }
  RowScores scores() {
    return {.scores = values.data(),
            .score_stride = std::ssize(values),
            .kth_score = kth.data(),
            .step = cache.world.step(),
            .block = cache.world.all_rows()};
  }

  Cache cache;
  std::vector<float> values;
  std::vector<float> kth;
  std::vector<std::int32_t> rows;  ///< by position
};

/// Distances of 64 rows, of which 10, 50 and 3 are the farthest, in this order.
std::vector<float> three_far_rows() {
  std::vector<float> distances(64, 0.25F);
  distances[10] = 8.0F;
  distances[50] = 7.5F;
  distances[3] = 7.0F;
  return distances;
}

TEST(CacheOps, FreeSlotsGoFirstTheLastFreedOnTop) {
  Cache cache({.slots = 100, .host_blocks = 4});
  for (std::int32_t row = 0; row < 100; ++row) {
    EXPECT_TRUE(evicted_by(cache, {row}).empty());
    EXPECT_EQ(cache.world.slot_of[static_cast<std::size_t>(row)], row);
  }
  cache.release({{30, 2}, {7, 1}});
  EXPECT_TRUE(evicted_by(cache, {200, 201, 202}).empty());
  EXPECT_EQ(cache.world.slot_of[200], 7);
  EXPECT_EQ(cache.world.slot_of[201], 31);
  EXPECT_EQ(cache.world.slot_of[202], 30);
  EXPECT_EQ(cache.world.counters.evictions, 0);
  EXPECT_EQ(cache.world.replacement.hand, 0);
  cache.release({{50, 1}});
  EXPECT_EQ(evicted_by(cache, {203, 204}).size(), 1U);  // one was free
}

TEST(CacheOps, WithoutScoresTheOldestOfAWindowGo) {
  Cache cache({.slots = 64, .host_blocks = 4});
  use(cache, range(0, 64));
  EXPECT_EQ(evicted_by(cache, {100}), std::set<std::int32_t>{0});
  use(cache, {1, 2, 4});
  EXPECT_EQ(evicted_by(cache, {101, 102}), (std::set<std::int32_t>{3, 5}));
  // Ticks that a layer skips age its slots.
  cache.world.tick = 100'000;
  use(cache, {6});
  EXPECT_EQ(evicted_by(cache, {103}).count(6), 0U);
}

TEST(CacheOps, WithScoresTheFarthestFromBeingSelectedGo) {
  ScoredPool pool(64, three_far_rows());
  use(pool.cache, pool.rows);  // the last used is the farthest
  use(pool.cache, {pool.rows[10]});
  EXPECT_EQ(evicted_by(pool.cache, {500}, pool.scores()), std::set<std::int32_t>{pool.rows[10]});
  pool.cache.release({{500, 1}});
  EXPECT_EQ(evicted_by(pool.cache, {501, 502, 503}, pool.scores()),
            (std::set<std::int32_t>{pool.rows[50], pool.rows[3]}));  // one slot was free
}

TEST(CacheOps, OfEquallyColdSlotsTheFirstBehindTheHandGo) {
  ScoredPool pool(64, std::vector<float>(64, 0.5F));
  use(pool.cache, pool.rows);
  pool.cache.world.replacement.hand = 62;
  EXPECT_EQ(evicted_by(pool.cache, {500, 501, 502}, pool.scores()),
            (std::set<std::int32_t>{pool.rows[62], pool.rows[63], pool.rows[0]}));
}

TEST(CacheOps, RowsThatWereSelectedAndScoresThatAreNoNumbers) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinite = std::numeric_limits<float>::infinity();
  std::vector<float> distances(64, 5.0F);
  distances[7] = -4.0F;      // above the k-th score, but not in use any more
  distances[20] = nan;       // ranks below everything
  distances[21] = infinite;  // a score of -inf
  ScoredPool pool(64, distances);
  use(pool.cache, pool.rows);
  // Beside a row that is infinitely far all others are equally warm.
  EXPECT_EQ(evicted_by(pool.cache, {500}, pool.scores()), std::set<std::int32_t>{pool.rows[21]});
  EXPECT_EQ(evicted_by(pool.cache, {501}, pool.scores()), std::set<std::int32_t>{pool.rows[20]});
  EXPECT_EQ(evicted_by(pool.cache, range(502, 60), pool.scores()).count(pool.rows[7]), 0U);
  EXPECT_NE(pool.cache.world.slot_of[static_cast<std::size_t>(pool.rows[7])], kNone);
}

TEST(CacheOps, ScoredAndUnscoredRowsMeetOnOneScale) {
  ScoredPool pool(64, std::vector<float>(32, 1.0F));
  World& world = pool.cache.world;
  const std::int32_t elsewhere = world.host_row_at(0, 448);  // no owner: nobody got that far
  use(pool.cache, range(elsewhere, 32));
  use(pool.cache, pool.rows);
  pool.values[5] = 1.0F - 64.0F;
  // The farthest of the scored and the oldest of all are coldest, whichever units.
  EXPECT_EQ(evicted_by(pool.cache, {500, 501}, pool.scores()), (std::set<std::int32_t>{pool.rows[5], elsewhere}));
  // Half as old as the oldest is colder than next to selected, which all the scored are now but one.
  pool.values[6] = 1.0F - 100.0F;
  const auto gone = evicted_by(pool.cache, {502, 503, 504, 505}, pool.scores());
  EXPECT_EQ(gone, (std::set<std::int32_t>{pool.rows[6], elsewhere + 1, elsewhere + 2, elsewhere + 3}));
}

TEST(CacheOps, WhatWasJustUsedIsNotColdForBeingTheOnlyOneWithoutAScore) {
  std::vector<float> distances(63, 1.0F);
  distances[9] = 64.0F;
  ScoredPool pool(64, distances);
  World& world = pool.cache.world;
  const std::int32_t elsewhere = world.host_row_at(0, 448);
  use(pool.cache, pool.rows);
  for (int i = 0; i < 40; ++i) {
    use(pool.cache, {elsewhere});
  }
  EXPECT_EQ(evicted_by(pool.cache, {500, 501}, pool.scores()).count(elsewhere), 0U);
}

TEST(CacheOps, NewRowsTakeTheSlotsThatWouldHaveGoneNext) {
  std::vector<float> distances(64, 0.25F);
  distances[10] = 8.0F;
  distances[50] = 7.5F;
  distances[3] = 7.0F;
  distances[7] = 1.0F;
  ScoredPool pool(64, distances);
  use(pool.cache, pool.rows);
  EXPECT_EQ(evicted_by(pool.cache, {500}, pool.scores()), std::set<std::int32_t>{pool.rows[10]});
  EXPECT_EQ(evicted_by_new(pool.cache, 501), pool.rows[50]);
  EXPECT_EQ(evicted_by_new(pool.cache, 502), pool.rows[3]);
  EXPECT_EQ(evicted_by_new(pool.cache, 503), pool.rows[7]);
}

TEST(CacheOps, AHintHoldsUntilItsSlotIsUsedAndASlotIsFree) {
  ScoredPool pool(64, three_far_rows());
  use(pool.cache, pool.rows);
  evicted_by(pool.cache, {500}, pool.scores());
  use(pool.cache, {pool.rows[50]});
  EXPECT_EQ(evicted_by_new(pool.cache, 501), pool.rows[3]);
  evicted_by(pool.cache, {502}, pool.scores());
  pool.cache.release({{502, 1}});
  EXPECT_EQ(evicted_by_new(pool.cache, 503), kNone);
}

TEST(CacheOps, WhereHardlyAnythingIsLeftTheLowestOfTheRowsJustFetchedGo) {
  std::vector<float> distances(16, 1.0F);
  distances[12] = -3.0F;
  distances[13] = -1.0F;
  distances[14] = -2.0F;
  distances[15] = -4.0F;
  ScoredPool pool(12, distances);
  use(pool.cache, {pool.rows.begin(), pool.rows.begin() + 12});
  CacheOps ops(pool.cache.world.layer());
  ops.begin(++pool.cache.world.tick);
  for (std::size_t i = 0; i < 5; ++i) {  // which leaves three
    ops.protect(ops.lookup(pool.rows[i]));
  }
  ops.allocate({pool.rows.begin() + 12, 4}, pool.scores());
  for (const std::size_t expected : {13U, 14U, 12U, 15U}) {
    EXPECT_EQ(evicted_by_new(pool.cache, 500 + static_cast<std::int32_t>(expected)), pool.rows[expected]);
  }
  EXPECT_THROW(ops.allocate_new(std::vector<std::int32_t>(20, 600)), StateError);
}

TEST(CacheOps, AWindowIsLookedAtPerCallAndNoMore) {
  const std::int32_t slots = 4 * kWindow;
  Cache cache({.slots = slots, .host_blocks = 40});
  use(cache, range(0, slots));
  ReplacementState& state = cache.world.replacement;
  const struct {
    std::int32_t needed;
    std::int32_t looked_at;
  } calls[] = {{1, 64}, {2, 64}, {3, 96}, {16, 512}, {64, 512}, {65, 1024}};
  std::int32_t next = slots;
  for (const auto& call : calls) {
    const std::int32_t hand = state.hand;
    const std::set<std::int32_t> gone = evicted_by(cache, range(next, call.needed));
    next += call.needed;
    EXPECT_EQ((state.hand - hand + slots) % slots, call.looked_at) << call.needed;
    EXPECT_EQ(std::ssize(gone), call.needed);
    for (const std::int32_t row : gone) {  // row r was given slot r
      EXPECT_LT((row - hand + slots) % slots, call.looked_at);
    }
  }
}

TEST(CacheOps, ManyVictimsAreSpreadEvenlyOverTheirWindows) {
  Cache cache({.slots = 4 * kWindow, .host_blocks = 48});
  use(cache, range(0, 4 * kWindow));
  const std::set<std::int32_t> gone = evicted_by(cache, range(4 * kWindow, 3 * 64));  // three windows
  for (std::int32_t window = 0; window < 3; ++window) {
    EXPECT_EQ(std::ranges::count_if(gone, [&](std::int32_t row) { return row / kWindow == window; }), 64) << window;
  }
}

TEST(CacheOps, OneTurnFindsWhateverMayBeTaken) {
  for (const std::int32_t hand : {0, 1, 700, 1999}) {
    Cache cache({.slots = 2000, .host_blocks = 40});
    use(cache, range(0, 2000));
    cache.world.replacement.hand = hand;
    CacheOps ops(cache.world.layer());
    ops.begin(++cache.world.tick);
    const std::set<std::int32_t> old = {3, 690, 1400, 1998};
    for (std::int32_t row = 0; row < 2000; ++row) {
      if (!old.contains(row)) {
        ops.protect(ops.lookup(row));
      }
    }
    --cache.world.tick;  // evicted_by goes on with the tick of the protected
    EXPECT_EQ(evicted_by(cache, {2001, 2002, 2003, 2004}), old) << hand;
    EXPECT_THROW(ops.allocate(std::vector<std::int32_t>{2005}), StateError);
  }
}

TEST(CacheOps, NoRoomChangesNothing) {
  for (const std::int32_t slots : {4, 200}) {
    Cache cache({.slots = slots, .host_blocks = 8});
    World& world = cache.world;
    use(cache, range(0, slots - 2));  // two are free
    CacheOps ops(world.layer());
    ops.begin(++world.tick);
    ops.protect(ops.lookup(0));
    const auto state = [&] {
      return std::tuple(world.slot_of, world.host_of, world.stamp, world.free_slots, world.replacement.free,
                        world.replacement.hand, world.counters.evictions);
    };
    const auto before = state();
    for (const std::int32_t wanted : {slots, slots + 1, 10 * slots}) {
      try {
        ops.allocate(std::vector<std::int32_t>(static_cast<std::size_t>(wanted), 300));
        FAIL();
      } catch (const StateError& error) {
        EXPECT_EQ(std::string(error.what()), "gpu_slots: " + std::to_string(wanted) + " slots wanted, but of " +
                                                 std::to_string(slots) + " only " + std::to_string(slots - 1) +
                                                 " are not in use by this step");
      }
      EXPECT_EQ(state(), before);
    }
    ops.allocate(range(300, slots - 1));  // exactly full is fine
    cache.check();
    EXPECT_EQ(world.counters.evictions, slots - 3);
    EXPECT_NE(ops.lookup(0), kNone);
    EXPECT_THROW(ops.allocate(std::vector<std::int32_t>{299}), StateError);
  }
}

TEST(CacheOps, TicksBeginAtOne) {
  Cache cache({});
  CacheOps ops(cache.world.layer());
  EXPECT_THROW(ops.begin(0), StateError);
  EXPECT_THROW(ops.begin(std::numeric_limits<std::int32_t>::min()), StateError);
  ops.begin(1);
}

}  // namespace
}  // namespace echo::reference_test
