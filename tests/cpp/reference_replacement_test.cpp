// The replacement rule against a second telling of it, through random calls.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "reference/cache_ops.hpp"
#include "reference_cache.hpp"

namespace echo::reference_test {
namespace {

/// The rule told once more, slowly: a class of coldness at a time.
class Rule {
 public:
  explicit Rule(std::int32_t slots) : row_of(static_cast<std::size_t>(slots), kNone), last(row_of.size(), 0) {
    free = std::vector<std::int32_t>(row_of.size());
    std::iota(free.rbegin(), free.rend(), 0);
  }

  /// Slots for so many rows at tick `now`, in order.
  std::vector<std::int32_t> give(std::int32_t wanted, std::int32_t now, const RowScores& scores) {
    std::vector<std::int32_t> given;
    while (!free.empty() && std::ssize(given) < wanted) {
      given.push_back(free.back());
      free.pop_back();
    }
    const auto slots = static_cast<std::int32_t>(row_of.size());
    const auto needed = wanted - static_cast<std::int32_t>(given.size());
    const std::int32_t width = needed == 0 ? 0 : std::min(slots, std::clamp(32 * needed, 64, 512));
    const std::int32_t share = std::max(1, width / 8);
    const std::int32_t planned = (needed + share - 1) / share;
    for (std::int32_t turn = 0; std::ssize(given) < wanted; ++turn) {
      const auto left = wanted - static_cast<std::int32_t>(given.size());
      const std::int32_t shares = turn < planned ? planned - turn : 1;
      std::int32_t quota = left / shares + (left % shares != 0 ? 1 : 0);
      std::vector<std::int32_t> window;
      for (std::int32_t i = 0; i < width; ++i) {
        window.push_back((hand + i) % slots);
      }
      hand = (hand + width) % slots;
      const std::vector<std::int32_t> classes = coldness_of(window, now, scores, given);
      for (std::int32_t level = kColdest; level >= 0 && quota > 0; --level) {
        for (std::size_t i = 0; i < window.size() && quota > 0; ++i) {
          if (classes[i] == level) {
            given.push_back(window[i]);
            --quota;
          }
        }
      }
    }
    return given;
  }

  std::vector<std::int32_t> row_of;  ///< kNone where free
  std::vector<std::int32_t> last;    ///< tick of last use
  std::vector<std::int32_t> free;
  std::int32_t hand = 0;

 private:
  /// Class of each slot, -1 where it may not be taken.
  std::vector<std::int32_t> coldness_of(const std::vector<std::int32_t>& window, std::int32_t now,
                                        const RowScores& scores, const std::vector<std::int32_t>& given) const {
    std::vector<std::int32_t> classes;
    float farthest = -1.0F;
    std::int32_t oldest = -1;
    const auto may_take = [&](std::int32_t slot) {
      return row_of[static_cast<std::size_t>(slot)] != kNone && last[static_cast<std::size_t>(slot)] != now &&
             std::ranges::find(given, slot) == given.end();
    };
    for (const int pass : {0, 1}) {
      for (const std::int32_t slot : window) {
        if (!may_take(slot)) {
          classes.insert(classes.end(), static_cast<std::size_t>(pass), -1);
          continue;
        }
        const float distance = scores.distance(row_of[static_cast<std::size_t>(slot)]);
        const std::int32_t age = now - last[static_cast<std::size_t>(slot)];
        if (pass == 0) {
          farthest = distance < 0.0F ? farthest : std::max(farthest, distance);
          oldest = std::max(oldest, age);
        } else if (distance < 0.0F) {
          classes.push_back(static_cast<std::int32_t>(static_cast<float>(age) / static_cast<float>(oldest) * 63.0F));
        } else {
          classes.push_back(distance == farthest ? 63 : static_cast<std::int32_t>(distance / farthest * 63.0F));
        }
      }
    }
    return classes;
  }
};

/// Random calls; the state is the model's after each.
void run_against_the_rule(std::int32_t slots, std::uint32_t seed) {
  std::mt19937 engine(seed);
  const auto pick = [&](std::int32_t n) { return static_cast<std::int32_t>(engine() % static_cast<unsigned>(n)); };
  Cache cache({.slots = slots, .host_blocks = 40, .batch = 4, .query_rows = 2, .table_stride = 10});
  World& world = cache.world;
  Rule rule(slots);
  std::vector<float> scores;
  std::vector<float> kth(8, 1.5F);
  for (int round = 0; round < 120; ++round) {
    for (std::size_t row = 0; row < 8; ++row) {  // sessions come and go
      world.positions[row] = row % 2 == 1 && world.positions[row - 1] != kNone ? world.positions[row - 1] + 1
                             : row % 2 == 0 && pick(4) != 0                    ? pick(638)
                                                                               : kNone;
      kth[row] = pick(10) == 0 ? std::numeric_limits<float>::quiet_NaN() : 1.5F;
    }
    cache.begin();
    scores = normal_floats(8 * 640, seed + static_cast<std::uint32_t>(round));
    const RowScores view{.scores = pick(3) == 0 ? nullptr : scores.data(),
                         .score_stride = 640,
                         .kth_score = kth.data(),
                         .step = world.step(),
                         .block = world.all_rows()};
    world.tick += 1 + (pick(12) == 0 ? pick(500) : 0);
    CacheOps ops(world.layer());
    ops.begin(world.tick);
    const std::int32_t least = pick(4);  // few rows, so that they come back, or any
    for (int call = 0; call < 3; ++call) {
      std::set<std::int32_t> missing;
      const std::int32_t uses = pick(slots / 6 + 2);
      for (std::int32_t i = 0; i < uses; ++i) {
        const std::int32_t row = pick(least == 0 ? slots + 20 : 2560);
        if (const std::int32_t slot = ops.lookup(row); slot != kNone) {
          ops.protect(slot);
          rule.last[static_cast<std::size_t>(slot)] = world.tick;
        } else {
          missing.insert(row);
        }
      }
      const std::vector<std::int32_t> rows(missing.begin(), missing.end());
      const auto given = rule.give(static_cast<std::int32_t>(rows.size()), world.tick, view);
      ops.allocate(rows, view);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(ops.lookup(rows[i]), given[i]);
        rule.row_of[static_cast<std::size_t>(given[i])] = rows[i];
        rule.last[static_cast<std::size_t>(given[i])] = world.tick;
      }
    }
    if (pick(6) == 0) {
      const std::int32_t first = pick(2500);
      for (std::int32_t row = first; row < first + 60; ++row) {
        if (const std::int32_t slot = ops.lookup(row); slot != kNone) {
          rule.row_of[static_cast<std::size_t>(slot)] = kNone;
          rule.free.push_back(slot);
        }
      }
      cache.release({{first, 60}});
    }
    cache.check();
    ASSERT_EQ(world.host_of, rule.row_of);
    ASSERT_EQ(world.replacement.hand, rule.hand);
  }
  EXPECT_GT(world.counters.evictions, 0);
}

TEST(Replacement, RandomCallsFollowTheRule) {
  for (const std::int32_t slots : {9, 40, 63, 64, 65, 129, 500, 700, 1500}) {
    run_against_the_rule(slots, static_cast<std::uint32_t>(slots));
  }
}

}  // namespace
}  // namespace echo::reference_test
