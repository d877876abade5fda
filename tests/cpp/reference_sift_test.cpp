// Sifting on the CPU: what is counted, bounded and listed, and that it decides nothing.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernels/number_formats.hpp"
#include "kernels/sift_bounds.hpp"
#include "reference_sift.hpp"

namespace echo::reference_test {
namespace {

float kth_largest(std::span<const float> row, std::size_t k) {
  std::vector<float> sorted(row.begin(), row.end());
  std::ranges::nth_element(sorted, sorted.begin() + static_cast<std::ptrdiff_t>(k) - 1, std::greater<>{});
  return sorted[k - 1];
}

/// What a sifted row says, against its scores.
void expect_consistent(Sifted& sifted, std::size_t i, std::int32_t capacity) {
  const RowSift& sift = sifted.sifts()[i];
  const std::span<const float> row = sifted.row(i);
  std::vector<std::int32_t> histogram(kSiftBins, 0);
  std::int32_t sampled = 0;
  const std::int32_t middle = static_cast<std::int32_t>(
      ordered_key(sifted.prediction(static_cast<std::size_t>(sifted.world().session[i]))) >> 17);
  for (std::size_t s = 0; s < row.size(); ++s) {
    // The row's blocks of 64, counted from the newest: the fifth, the 13th ...; the middle one of up to eight.
    const std::size_t newest = (row.size() - 1) / 64;
    const std::size_t from_newest = newest - s / 64;
    if (from_newest % 8 == (newest < 8 ? newest / 2 : 4)) {
      const std::int32_t bin = static_cast<std::int32_t>(ordered_key(row[s]) >> 17) - middle + 128;
      ++histogram[static_cast<std::size_t>(std::clamp(bin, 0, 255))];
      ++sampled;
    }
  }
  EXPECT_EQ(sift.sampled, sampled);
  EXPECT_TRUE(std::ranges::equal(sift.histogram, histogram));
  if (sift.bounds == 0) {
    EXPECT_EQ(sift.compared, 0);
    EXPECT_EQ(sift.found, 0);
    return;
  }
  EXPECT_GE(high(sift), low(sift));
  EXPECT_EQ(sift.compared, static_cast<std::int32_t>(row.size()));
  std::int32_t found = 0;
  const ScoredToken* listed = sifted.tokens.data() + i * static_cast<std::size_t>(capacity);
  for (std::size_t s = 0; s < row.size(); ++s) {
    if (ordered_key(row[s]) >= low(sift)) {
      if (found < capacity) {
        EXPECT_EQ(listed[found].position, static_cast<std::int32_t>(s));
        EXPECT_EQ(listed[found].key, ordered_key(row[s]));
      }
      ++found;
    }
  }
  EXPECT_EQ(sift.found, found);
}

using Fill = std::function<float(std::size_t, std::mt19937&)>;

TEST(Sift, DecidesNothingWhateverIsPredicted) {
  const std::vector<float> kinds = {kInf, -kInf, kQuietNan, 0.0F, -0.0F, 1.0F, -1.0F, 1e-42F};
  const std::vector<Fill> fills = {
      [](std::size_t, std::mt19937& engine) { return std::normal_distribution<float>(2.0F, 1.0F)(engine); },
      [](std::size_t, std::mt19937&) { return 0.25F; },
      [](std::size_t i, std::mt19937&) { return i % 97 == 0 ? static_cast<float>(i) : 0.0F; },
      [](std::size_t, std::mt19937& engine) { return static_cast<float>(engine() % 4); },
      [](std::size_t, std::mt19937& engine) { return std::uniform_real_distribution<float>(-3e38F, 3e38F)(engine); },
      [&](std::size_t, std::mt19937& engine) { return kinds[engine() % kinds.size()]; },
      [](std::size_t, std::mt19937&) { return kQuietNan; },
      [](std::size_t i, std::mt19937&) { return static_cast<float>(i); },
  };
  std::mt19937 engine(3);
  for (const Fill& fill : fills) {
    Sifted sifted({.host_blocks = 36, .batch = 4, .table_stride = 9}, {575, 64, 300, kNone});
    for (std::size_t i = 0; i < 3; ++i) {
      for (std::size_t s = 0; s < sifted.row(i).size(); ++s) {
        sifted.row(i)[s] = fill(s, engine);
      }
    }
    const Sifted::Selected expected = sifted.select(/*from_lists=*/false);
    std::vector<float> predictions = {kInf, -kInf, kQuietNan, 0.0F, -1.0F, 2.5F, 1e30F, -1e-30F};
    for (std::size_t i = 0; i < 3; ++i) {
      const float kth = expected.kth[i];
      predictions.insert(predictions.end(), {kth, kth * 1.01F, kth * 0.5F, -kth});
    }
    for (const float prediction : predictions) {
      for (std::size_t session = 0; session < 3; ++session) {
        sifted.prediction(session) = prediction;
      }
      sifted.sift();
      const Sifted::Selected got = sifted.select(/*from_lists=*/true);
      EXPECT_EQ(got.selection, expected.selection) << prediction;
      EXPECT_TRUE(same_bits(got.kth, expected.kth)) << prediction;
      for (std::size_t i = 0; i < 3 && !std::isnan(prediction); ++i) {
        expect_consistent(sifted, i, 256);
      }
      EXPECT_EQ(sifted.sifts()[3].sampled, 0);
    }
  }
}

TEST(Sift, AGoodPredictionSparesTheSearch) {
  Sifted sifted({.host_blocks = 64, .table_stride = 64}, {4000});
  fill_distinct(sifted.row(0));
  sifted.prediction(0) = kth_largest(sifted.row(0), kTopK);
  sifted.sift();
  EXPECT_GE(sifted.sifts()[0].found, kTopK);
  EXPECT_LE(sifted.sifts()[0].found, 256);
  sifted.select(/*from_lists=*/true);
  EXPECT_EQ(sifted.world().counters.full_selects, 0);
  EXPECT_EQ(sifted.world().counters.candidates, sifted.sifts()[0].found);
}

TEST(Sift, ListsThatDoNotDoAreCounted) {
  Sifted sifted({.host_blocks = 64, .table_stride = 64}, {4000}, /*capacity=*/16);
  fill_distinct(sifted.row(0));
  const Sifted::Selected expected = sifted.select(/*from_lists=*/false);
  EXPECT_EQ(sifted.world().counters.full_selects, 0);  // there was no list
  const auto full_select = [&] {
    const std::int64_t before = sifted.world().counters.full_selects;
    EXPECT_EQ(sifted.select(/*from_lists=*/true).selection, expected.selection);
    return sifted.world().counters.full_selects - before == 1;
  };
  sifted.prediction(0) = 1.9F;
  sifted.sift();
  EXPECT_EQ(sifted.sifts()[0].bounds, 0U);
  EXPECT_TRUE(full_select()) << "more would be listed than there is room for";
  EXPECT_EQ(sifted.world().counters.candidates, 0);
  // What no correct list can be told from: each condition by itself.
  RowSift& sift = sifted.rows[0];
  const auto listed = static_cast<std::int32_t>(sifted.tokens.size());
  for (std::int32_t s = 0; s < listed; ++s) {
    sifted.tokens[static_cast<std::size_t>(s)] = {.key = 1U << 31, .position = s};
  }
  sift = row_sift(4001, 10, (1ULL << 62) | 1);
  EXPECT_EQ(sifted.select(true).selection.front(), 0);  // it is believed
  sift.compared = 4000;
  EXPECT_TRUE(full_select()) << "one was not compared";
  sift = row_sift(4001, kTopK - 1, (1ULL << 62) | 1);
  EXPECT_TRUE(full_select()) << "fewer than top-k";
  sift = row_sift(4001, 17, (1ULL << 62) | 1);
  EXPECT_TRUE(full_select()) << "more than are listed";
  sift = row_sift(4001, 10, 0);
  EXPECT_TRUE(full_select()) << "no bound";
}

TEST(Sift, ListsMayBeInAnyOrder) {
  Sifted sifted({.host_blocks = 64, .table_stride = 64}, {4000});
  for (std::size_t s = 0; s < 4001; ++s) {
    sifted.row(0)[s] = s % 200 == 17 ? 5.0F : (s % 500 == 3 ? 6.0F : 1.0F);  // more fives than are selected
  }
  const Sifted::Selected expected = sifted.select(/*from_lists=*/false);
  std::vector<ScoredToken> list;
  for (std::int32_t s = 4000; s >= 0; --s) {
    if (sifted.row(0)[static_cast<std::size_t>(s)] > 4.0F) {
      list.push_back({.key = ordered_key(sifted.row(0)[static_cast<std::size_t>(s)]), .position = s});
    }
  }
  std::ranges::shuffle(list, std::mt19937(5));
  std::ranges::copy(list, sifted.tokens.begin());
  sifted.rows[0] = row_sift(4001, static_cast<std::int32_t>(list.size()), ordered_key(4.5F));
  const Sifted::Selected got = sifted.select(/*from_lists=*/true);
  EXPECT_EQ(got.selection, expected.selection);
  EXPECT_TRUE(same_bits(got.kth, expected.kth));
  EXPECT_EQ(sifted.world().counters.full_selects, 0);
}

TEST(Sift, RowsThatSelectAllTheySeeAndUnknownPredictionsAreLeftAlone) {
  Sifted sifted({.host_blocks = 36, .batch = 4, .table_stride = 9}, {kTopK - 1, kTopK, 200, 200});
  for (std::size_t i = 0; i < 4; ++i) {
    std::ranges::fill(sifted.row(i), 1.0F);
    sifted.prediction(i) = i == 2 ? kQuietNan : 1.0F;
  }
  sifted.world().session[3] = kNone;
  sifted.sift(kAll);
  for (const std::size_t i : {0U, 2U, 3U}) {
    EXPECT_EQ(sifted.sifts()[i].sampled, 0) << i;
    EXPECT_EQ(sifted.sifts()[i].bounds, 0U) << i;
  }
  EXPECT_EQ(sifted.sifts()[1].sampled, kTopK + 1);
}

TEST(Sift, LeavesTheRowsOfTheNextCallZeroed) {
  Sifted sifted({.host_blocks = 4}, {100});
  std::ranges::fill(sifted.row(0), 1.0F);
  sifted.sift();
  EXPECT_EQ(sifted.rows[1].found, 0);
  EXPECT_EQ(sifted.prefetched[1], 0);
  std::int32_t word = 5;
  sifted.rows[0].found = sifted.rows[1].found = 9;
  CpuBackend(1).begin(
      {.step = sifted.world().step(), .host_blocks = 4, .sift_rows = sifted.rows.data(), .prefetched = &word});
  EXPECT_EQ(sifted.rows[0].found, 0);
  EXPECT_EQ(sifted.rows[1].found, 9);  // not of this pass
  EXPECT_EQ(word, 0);
}

TEST(SiftRule, BoundsLieWhereTheSampleReachesTheTargets) {
  const std::int32_t first = first_bin(2.0F);
  std::vector<std::int32_t> histogram(kSiftBins, 0);
  histogram[200] = 3;
  histogram[150] = 4;
  histogram[128] = 5;
  histogram[127] = 6;
  const auto bounds = [&](std::int32_t candidates, std::int32_t prefetch, std::int32_t most = 100) {
    return sift_bounds(histogram.data(), {.candidates = candidates, .prefetch = prefetch, .most = most}, first);
  };
  const auto keys = [&](std::int32_t candidates, std::int32_t prefetch) {
    const std::uint32_t middle = ordered_key(2.0F);
    return pack_bounds(middle + (static_cast<std::uint32_t>(candidates - 128) << 17),
                       middle + (static_cast<std::uint32_t>(prefetch - 128) << 17));
  };
  EXPECT_EQ(bounds(7, 3), keys(150, 200));
  EXPECT_EQ(bounds(8, 4), keys(128, 150));
  EXPECT_EQ(bounds(18, 7), keys(127, 150));
  EXPECT_EQ(bounds(7, 7), keys(150, 150)) << "they may be the same";
  EXPECT_EQ(bounds(8, 3, 12), keys(128, 200));
  EXPECT_EQ(bounds(8, 3, 11), 0U) << "too many";
  EXPECT_EQ(bounds(19, 2), 0U) << "not to be had";
  histogram[0] = 100;  // of any key below
  EXPECT_EQ(bounds(19, 2), 0U);
  histogram[255] = 50;  // of any key above
  EXPECT_EQ(bounds(19, 2), pack_bounds(static_cast<std::uint32_t>(keys(255, 255)), kNoKey));
  EXPECT_EQ(bounds(52, 51), keys(200, 200));
  // Above the keys of all numbers there is nothing to bound.
  EXPECT_EQ(sift_bounds(histogram.data(), {.candidates = 19, .prefetch = 2, .most = 100}, first_bin(kInf)), 0U);
}

TEST(SiftRule, BinsNearTheEndsOfTheKeys) {
  for (const float prediction : {kInf, -kInf, 3e38F, -3e38F, 0.0F, 1.0F}) {
    const std::int32_t first = first_bin(prediction);
    EXPECT_EQ(bin_of(ordered_key(prediction), first), 128);
    EXPECT_EQ(bin_of(0U, first), std::max(0, -first));
    std::uint32_t last = 0;
    for (std::int32_t bin = 1; bin < kSiftBins; ++bin) {
      const std::uint32_t key = key_of_bin(bin, first);
      if (key != 0U) {
        EXPECT_GT(key, last);
        last = key;
        EXPECT_EQ(bin_of(key, first), bin);
        EXPECT_EQ(bin_of(key - 1, first), bin - 1);
      }
    }
  }
}

TEST(SiftRule, TargetsAreWhatTheSampleHasOfTheBest) {
  const SiftTargets targets = sift_targets(2048, 4096, 12500, 100000);
  EXPECT_EQ(targets.candidates, 256 + 64 + 2);
  EXPECT_EQ(targets.prefetch, 256 + 8 + 1);
  EXPECT_EQ(targets.most, 460);
  for (const std::int32_t length : {1, 63, 64, 65, 511, 512, 513, 575, 576, 577, 100000}) {
    for (std::int32_t first = 0; first < kSampleEvery; ++first) {
      std::int32_t sampled = 0;
      for (std::int32_t s = 0; s < length; ++s) {
        sampled += s / 64 % 8 == first ? 1 : 0;
      }
      EXPECT_EQ(sample_of(length, first), sampled) << length << " from " << first;
    }
  }
}

}  // namespace
}  // namespace echo::reference_test
