// The rules of sifting: bins, keys and samples agree with each other.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/sift_bounds.hpp"

namespace echo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(SiftBounds, ABinHasTheKeysFromItsLeastOneOn) {
  std::mt19937 engine(1);
  for (const float predicted : {1.0F, -3.0F, 0.0F, 1e-38F, 3e38F, -3e38F, kInf, -kInf}) {
    const std::int32_t first = first_bin(predicted);
    EXPECT_EQ(bin_of(ordered_key(predicted), first), kSiftBins / 2);
    for (std::int32_t bin = 1; bin < kSiftBins; ++bin) {
      const std::uint32_t key = key_of_bin(bin, first);
      if (key == 0U) {
        continue;
      }
      EXPECT_EQ(bin_of(key, first), bin);
      EXPECT_LT(bin_of(key - 1, first), bin);
      const float least = value_of_key(key);
      ASSERT_FALSE(std::isnan(least)) << bin << " of " << predicted;
      for (int i = 0; i < 20; ++i) {  // comparing scores is comparing keys
        const float score = float_of(static_cast<std::uint32_t>(engine()));
        EXPECT_EQ(score >= least, ordered_key(score) >= key) << score << " with " << least;
      }
      EXPECT_TRUE(least > 0.0F || -0.0F >= least);
    }
  }
}

TEST(SiftBounds, NoScoreIsAboveNoKey) { EXPECT_TRUE(std::isnan(value_of_key(kNoKey))); }

TEST(SiftBounds, ASampleHasEveryEighthBlock) {
  std::int32_t expected = 0;
  for (std::int32_t length = 0; length < 3000; ++length) {
    EXPECT_EQ(sample_of(length), expected);
    expected += length / kTokensPerBlock % kSampleEvery == 0 ? 1 : 0;
  }
}

/// With random scores the bound leaves at least k candidates, and not many more.
TEST(SiftBounds, LeavesEnoughCandidates) {
  constexpr std::int32_t kK = 512;
  constexpr std::int32_t kLength = 40'000;
  std::mt19937 engine(2);
  std::normal_distribution<float> normal(2.0F, 1.0F);
  std::vector<float> scores(kLength);
  for (int turn = 0; turn < 20; ++turn) {
    std::ranges::generate(scores, [&] { return normal(engine); });
    std::vector<float> sorted = scores;
    std::ranges::nth_element(sorted, sorted.begin() + (kK - 1), std::greater<>{});
    const std::int32_t first = first_bin(sorted[kK - 1] * 0.95F);
    std::vector<std::int32_t> bins(kSiftBins, 0);
    for (std::int32_t token = 0; token < kLength; ++token) {
      if (token / kTokensPerBlock % kSampleEvery == 0) {
        ++bins[static_cast<std::size_t>(bin_of(ordered_key(scores[static_cast<std::size_t>(token)]), first))];
      }
    }
    const SiftTargets targets = sift_targets(kK, 4 * kK, sample_of(kLength), kLength);
    EXPECT_LT(targets.prefetch, targets.candidates);
    std::int32_t bin = kSiftBins;
    std::int32_t count = 0;
    while (count < targets.candidates) {
      count += bins[static_cast<std::size_t>(--bin)];
    }
    ASSERT_LE(count, targets.most);
    const std::uint32_t bound = key_of_bin(bin, first);
    const auto found = std::ranges::count_if(scores, [&](float score) { return ordered_key(score) >= bound; });
    EXPECT_GE(found, kK);
    EXPECT_LE(found, 2 * kK);
  }
}

}  // namespace
}  // namespace echo
