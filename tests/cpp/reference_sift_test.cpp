// Sifting on the CPU: what is listed, and that it decides nothing.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernels/number_formats.hpp"
#include "kernels/prediction.hpp"
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
  if (sift.candidates == 0) {
    EXPECT_EQ(sift.compared, 0);
    EXPECT_EQ(sift.found, 0);
    return;
  }
  EXPECT_GE(sift.prefetch, sift.candidates);
  EXPECT_EQ(sift.compared, static_cast<std::int32_t>(row.size()));
  std::int32_t found = 0;
  const ScoredToken* listed = sifted.tokens.data() + i * static_cast<std::size_t>(capacity);
  for (std::size_t s = 0; s < row.size(); ++s) {
    if (ordered_key(row[s]) >= sift.candidates) {
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
        sifted.thresholds[session * 3 + 1] = prediction;
        sifted.deviations[session * 3 + 1] = engine() % 3 == 0 ? predictions[engine() % 8] : 0.25F;
      }
      sifted.sift();
      const Sifted::Selected got = sifted.select(/*from_lists=*/true);
      EXPECT_EQ(got.selection, expected.selection) << prediction;
      EXPECT_TRUE(same_bits(got.kth, expected.kth)) << prediction;
      for (std::size_t i = 0; i < 3; ++i) {
        expect_consistent(sifted, i, 256);
      }
      EXPECT_EQ(sifted.sifts()[3].compared, 0);
    }
  }
}

TEST(Sift, AGoodPredictionSparesTheSearch) {
  Sifted sifted({.host_blocks = 64, .table_stride = 64}, {4000});
  fill_distinct(sifted.row(0));
  sifted.bound(0, kth_largest(sifted.row(0), 2 * kTopK), kth_largest(sifted.row(0), kTopK));
  sifted.sift();
  EXPECT_NEAR(sifted.sifts()[0].found, 2 * kTopK, 1);
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
  sifted.bound(0, 1.9F);
  sifted.sift();
  EXPECT_GT(sifted.sifts()[0].found, 16);
  EXPECT_TRUE(full_select()) << "more are found than there is room for";
  EXPECT_EQ(sifted.world().counters.candidates, 16);
  // What no correct list can be told from: each condition by itself.
  RowSift& sift = sifted.rows[0];
  const auto listed = static_cast<std::int32_t>(sifted.tokens.size());
  for (std::int32_t s = 0; s < listed; ++s) {
    sifted.tokens[static_cast<std::size_t>(s)] = {.key = 1U << 31, .position = s};
  }
  sift = row_sift(4001, 10, 1U);
  EXPECT_EQ(sifted.select(true).selection.front(), 0);  // it is believed
  sift.compared = 4000;
  EXPECT_TRUE(full_select()) << "one was not compared";
  sift = row_sift(4001, kTopK - 1, 1U);
  EXPECT_TRUE(full_select()) << "fewer than top-k";
  sift = row_sift(4001, 17, 1U);
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
    if (i != 2) {
      sifted.bound(i, 1.0F);
    }
  }
  sifted.world().session[3] = kNone;
  sifted.sift(kAll);
  for (const std::size_t i : {0U, 2U, 3U}) {
    EXPECT_EQ(sifted.sifts()[i].compared, 0) << i;
    EXPECT_EQ(sifted.sifts()[i].candidates, 0U) << i;
  }
  EXPECT_EQ(sifted.sifts()[1].compared, kTopK + 1);
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

}  // namespace
}  // namespace echo::reference_test
