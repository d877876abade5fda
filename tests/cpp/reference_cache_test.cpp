// Random passes through append, recall and release, against a plain model of the bytes.

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "reference_cache.hpp"

namespace echo::reference_test {
namespace {

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
    const std::int32_t how = pick(4);  // 0: as a prefill would, without slots; 1: together with the recall
    cache.begin(/*claims=*/how != 0);
    if (how != 1) {
      cache.append(round);
    }
    std::vector<std::int32_t> selection(6 * kTopK, kNone);
    for (std::size_t row = 0; row < 6; ++row) {
      for (std::size_t j = 0; j < kTopK && world.positions[row] != kNone; ++j) {
        selection[row * kTopK + j] = pick(8) == 0 ? kNone : pick(world.positions[row] + 1);
      }
    }
    const Scores scores{.scores = normal_floats(6 * 256, static_cast<unsigned>(round)),
                        .kth = std::vector<float>(6, 0.8F)};
    const std::vector<std::int32_t> slots = how == 1   ? cache.append_and_recall(selection, round, scores)
                                            : how == 2 ? cache.recall(selection, world.all_rows(), {}, scores)
                                                       : cache.recall(selection);
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
    for (std::size_t row = 0; row < 6 && how != 0; ++row) {  // new rows have slots
      if (const std::int32_t host_row = cache.host_row_of_pass(row); host_row != kNone) {
        ASSERT_NE(world.slot_of[static_cast<std::size_t>(host_row)], kNone);
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
