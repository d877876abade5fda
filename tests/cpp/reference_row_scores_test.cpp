// Which rows the scores of a block say something about, and what.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "cache_manager/row_scores.hpp"
#include "echo/errors.hpp"
#include "reference_cache.hpp"

namespace echo::reference_test {
namespace {

constexpr std::int64_t kStride = 4 * kTokensPerBlock;

/// Two sessions of two query rows each, in a pool of which some blocks are nobody's.
struct Scored {
  Scored() : cache({.slots = 64, .host_blocks = 11, .batch = 2, .query_rows = 2}), kth(4, 2.0F) {
    cache.world.positions = {99, 100, 190, 191};
    scores = normal_floats(4 * kStride, 1);
    cache.begin();
  }
  RowScores of(BlockView block) {
    return {.scores = scores.data() + block.first * kStride,
            .score_stride = kStride,
            .kth_score = kth.data(),
            .step = cache.world.step(),
            .block = block};
  }
  RowScores all() { return of(cache.world.all_rows()); }
  /// What the given query row says about a position of its session.
  float expected(std::int32_t query, std::int32_t position) const {
    return std::max(
        0.0F, kth[static_cast<std::size_t>(query)] - scores[static_cast<std::size_t>(query * kStride + position)]);
  }

  Cache cache;
  std::vector<float> scores;
  std::vector<float> kth;
};

TEST(RowScores, TheLastQueryOfASessionSpeaksForItsRows) {
  Scored scored;
  const World& world = scored.cache.world;
  std::map<std::int32_t, float> known;
  for (std::int32_t position = 0; position < 256; ++position) {
    if (position <= 100) {
      known[world.host_row_at(0, position)] = scored.expected(1, position);
    }
    if (position <= 191) {
      known[world.host_row_at(1, position)] = scored.expected(3, position);
    }
  }
  const RowScores scores = scored.all();
  for (std::int32_t row = 0; row < 11 * kTokensPerBlock; ++row) {
    EXPECT_EQ(scores.distance(row), known.contains(row) ? known[row] : kNotScored) << row;
  }
}

TEST(RowScores, NothingIsKnownWithoutScoresOrKthScores) {
  Scored scored;
  const std::int32_t row = scored.cache.world.host_row_at(1, 5);
  EXPECT_GE(scored.all().distance(row), 0.0F);
  RecallParams params{};
  params.step = scored.cache.world.step();
  params.block = scored.cache.world.all_rows();
  EXPECT_EQ(row_scores(params).distance(row), kNotScored);
  params.scores = scored.scores.data();
  EXPECT_EQ(row_scores(params).distance(row), kNotScored);
  params.kth_score = scored.kth.data();
  params.score_stride = kStride;
  EXPECT_EQ(row_scores(params).distance(row), scored.expected(3, 5));
  params.scores = nullptr;
  EXPECT_EQ(row_scores(params).distance(row), kNotScored);
}

TEST(RowScores, NothingIsReadBehindTheScores) {
  Scored scored;
  const std::int32_t row = scored.cache.world.host_row_at(1, 190);
  RowScores scores = scored.all();
  EXPECT_GE(scores.distance(row), 0.0F);
  scores.score_stride = 190;
  EXPECT_EQ(scores.distance(row), kNotScored);
}

TEST(RowScores, OwnersThatAreOutOfDateAreNotBelieved) {
  Scored scored;
  World& world = scored.cache.world;
  const std::int32_t row = world.host_row_at(0, 70);
  BlockOwner& owner = world.owners[static_cast<std::size_t>(row / kTokensPerBlock)];
  const BlockOwner right = owner;
  for (const BlockOwner wrong :
       {BlockOwner{kNone, kNone}, BlockOwner{0, 0}, BlockOwner{1, 1}, BlockOwner{2, 1}, BlockOwner{0, 4},
        BlockOwner{0, -3}, BlockOwner{-7, 1}, BlockOwner{1 << 30, 1 << 30}}) {
    owner = wrong;
    EXPECT_EQ(scored.all().distance(row), kNotScored) << wrong.entry << " " << wrong.index;
  }
  owner = right;
  EXPECT_GE(scored.all().distance(row), 0.0F);
  world.positions[1] = 69;  // the session was cut: the row belongs to no token
  EXPECT_EQ(scored.all().distance(row), kNotScored);
  world.positions[1] = kNone;  // padding
  EXPECT_EQ(scored.all().distance(row), kNotScored);
}

TEST(RowScores, OnlyRowsOfTheBlockSpeak) {
  Scored scored;
  const World& world = scored.cache.world;
  const std::int32_t rows[] = {world.host_row_at(0, 3), world.host_row_at(1, 3)};
  const RowScores first = scored.of({.first = 0, .count = 1, .tick_offset = 0});
  EXPECT_EQ(first.distance(rows[0]), scored.expected(0, 3));  // the last of the block, not of the session
  EXPECT_EQ(first.distance(world.host_row_at(0, 100)), kNotScored);
  EXPECT_EQ(first.distance(rows[1]), kNotScored);
  const RowScores middle = scored.of({.first = 1, .count = 2, .tick_offset = 1});
  EXPECT_EQ(middle.distance(rows[0]), scored.expected(1, 3));
  EXPECT_EQ(middle.distance(rows[1]), scored.expected(2, 3));
}

TEST(RowScores, FewerThanTopKTokensAndScoresThatAreNoNumbers) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinite = std::numeric_limits<float>::infinity();
  Scored scored;
  const std::int32_t row = scored.cache.world.host_row_at(0, 3);
  float& score = scored.scores[static_cast<std::size_t>(kStride + 3)];
  for (const auto& [given, expected] : {std::pair{2.0F, 0.0F},
                                        {3.0F, 0.0F},
                                        {infinite, 0.0F},
                                        {-1.0F, 3.0F},
                                        {-infinite, infinite},
                                        {nan, 3.0e38F},
                                        {-nan, 3.0e38F}}) {
    score = given;
    EXPECT_EQ(scored.all().distance(row), expected) << given;
  }
  scored.kth[1] = -infinite;
  score = -infinite;
  EXPECT_EQ(scored.all().distance(row), 3.0e38F);
  scored.kth[1] = nan;
  EXPECT_EQ(scored.all().distance(row), kNotScored);
}

TEST(Begin, NamesAnEntryForEachBlockWithTokens) {
  Scored scored;
  World& world = scored.cache.world;
  const auto owner = [&](std::int32_t entry, std::int32_t index) {
    const auto block = static_cast<std::size_t>(world.host_row_at(entry, index * 64) / 64);
    return std::pair(world.owners[block].entry, world.owners[block].index);
  };
  EXPECT_EQ(owner(0, 0), std::pair(0, 0));
  EXPECT_EQ(owner(0, 1), std::pair(0, 1));
  EXPECT_EQ(owner(0, 2), std::pair(kNone, kNone));  // nothing is there yet
  EXPECT_EQ(owner(1, 2), std::pair(1, 2));
  EXPECT_EQ(owner(1, 3), std::pair(kNone, kNone));
  // Padding, and tables that name no block, leave all as it was. Of those that share a block any may be named.
  world.positions = {kNone, kNone, 200, kNone};
  world.block_table[4 + 3] = -5;
  world.block_table[4 + 2] = 11;
  world.block_table[4 + 1] = world.block_table[1];
  scored.cache.begin();
  EXPECT_EQ(owner(0, 0), std::pair(0, 0));
  EXPECT_EQ(owner(0, 1), std::pair(1, 1));
  world.positions[2] = 4 * kTokensPerBlock;
  EXPECT_THROW(scored.cache.begin(), StateError);
}

}  // namespace
}  // namespace echo::reference_test
