#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "reference_world.hpp"

namespace echo::reference_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kQuietNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kUntouched = -777.0F;

struct Selected {
  std::vector<std::int32_t> selection;
  std::vector<float> kth_score;
};

/// Rows of the given scores, each of its own length; what lies behind is poisoned with +inf.
Selected run_select(const std::vector<std::vector<float>>& rows, std::int32_t k, std::int64_t threads) {
  std::size_t longest = 0;
  for (const auto& row : rows) {
    longest = std::max(longest, row.size());
  }
  const std::size_t stride = longest + 3;
  const auto count = static_cast<std::int32_t>(rows.size());
  World world(small_shape(RowFormat::fp32, IndexKeyFormat::fp32, k),
              {.host_blocks = 1, .batch = count, .table_stride = static_cast<std::int32_t>(stride / 64 + 1)});
  std::vector<float> scores(stride * rows.size(), kInf);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    world.positions[i] = static_cast<std::int32_t>(rows[i].size()) - 1;
    std::copy(rows[i].begin(), rows[i].end(), scores.begin() + static_cast<std::ptrdiff_t>(i * stride));
  }
  Selected result{.selection = std::vector<std::int32_t>(rows.size() * static_cast<std::size_t>(k), 1 << 30),
                  .kth_score = std::vector<float>(rows.size(), kUntouched)};
  CpuBackend(threads).select({.step = world.step(),
                              .block = world.all_rows(),
                              .shape = world.shape,
                              .scores = scores.data(),
                              .score_stride = static_cast<std::int64_t>(stride),
                              .selection = result.selection.data(),
                              .kth_score = result.kth_score.data()});
  return result;
}

/// By a stable sort, with the order written out: NaN last, ties by position.
Selected by_sorting(const std::vector<std::vector<float>>& rows, std::int32_t k) {
  Selected result;
  for (const auto& row : rows) {
    std::vector<std::int32_t> order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      const float x = row[static_cast<std::size_t>(a)];
      const float y = row[static_cast<std::size_t>(b)];
      return std::isnan(y) ? !std::isnan(x) : x > y;
    });
    const auto wanted = static_cast<std::size_t>(k);
    result.kth_score.push_back(order.size() < wanted ? kUntouched : row[static_cast<std::size_t>(order[wanted - 1])]);
    order.resize(std::min(order.size(), wanted));
    std::sort(order.begin(), order.end());
    order.resize(wanted, kNone);
    result.selection.insert(result.selection.end(), order.begin(), order.end());
  }
  return result;
}

void expect_as_sorted(const std::vector<std::vector<float>>& rows, std::int32_t k) {
  const Selected expected = by_sorting(rows, k);
  for (const std::int64_t threads : {1, 4}) {
    const Selected got = run_select(rows, k, threads);
    EXPECT_EQ(got.selection, expected.selection);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (std::isnan(expected.kth_score[i])) {
        EXPECT_TRUE(std::isnan(got.kth_score[i])) << i;
      } else {
        EXPECT_EQ(got.kth_score[i], expected.kth_score[i]) << i;
      }
    }
  }
}

std::vector<float> filled(std::size_t length, const std::function<float(std::size_t, std::mt19937&)>& value) {
  std::mt19937 engine(static_cast<unsigned>(length));
  std::vector<float> row(length);
  for (std::size_t i = 0; i < length; ++i) {
    row[i] = value(i, engine);
  }
  return row;
}

TEST(Select, LengthsAroundTopK) {
  const std::int32_t k = 16;
  std::vector<std::vector<float>> rows;
  for (const std::size_t length : {0U, 1U, 2U, 15U, 16U, 17U, 63U, 64U, 65U, 127U, 128U, 1000U, 4096U}) {
    rows.push_back(normal_floats(length, static_cast<unsigned>(length)));
  }
  expect_as_sorted(rows, k);
}

TEST(Select, TopKAtLaneBoundaries) {
  for (const std::int32_t k : {1, 31, 32, 33, 63, 64, 65, 255, 2048}) {
    expect_as_sorted({normal_floats(3000, 1), normal_floats(static_cast<std::size_t>(k), 2)}, k);
  }
}

TEST(Select, AdversarialScores) {
  const std::size_t n = 2000;
  const auto uniform = [](float low, float high) {
    return [=](std::size_t, std::mt19937& engine) { return std::uniform_real_distribution<float>(low, high)(engine); };
  };
  const std::vector<float> kinds = {kInf, -kInf, kQuietNan, -kQuietNan, 0.0F, -0.0F, 1.0F, -1.0F, 1e-42F, -1e-42F};
  const std::vector<std::vector<float>> rows = {
      filled(n, [](std::size_t, std::mt19937&) { return 0.25F; }),
      filled(n, [](std::size_t i, std::mt19937&) { return i % 97 == 0 ? static_cast<float>(i) : 0.0F; }),
      filled(n, [](std::size_t i, std::mt19937&) { return i % 2 == 0 ? 0.0F : -0.0F; }),
      filled(n, uniform(1.0F, 1.245F)),
      filled(n, uniform(-3e38F, 3e38F)),
      filled(n, [](std::size_t i, std::mt19937&) { return static_cast<float>(i); }),
      filled(n, [](std::size_t i, std::mt19937&) { return -static_cast<float>(i); }),
      filled(n, [](std::size_t, std::mt19937&) { return kQuietNan; }),
      filled(n, [](std::size_t, std::mt19937&) { return -kInf; }),
      filled(n, [](std::size_t i, std::mt19937&) { return i % 3 == 0 ? -kInf : kQuietNan; }),
      filled(n, [&](std::size_t, std::mt19937& engine) { return kinds[engine() % kinds.size()]; }),
      filled(n, [](std::size_t, std::mt19937& engine) { return static_cast<float>(engine() % 4); }),
  };
  for (const std::int32_t k : {1, 64, 700, 1999, 2000, 2001}) {
    expect_as_sorted(rows, k);
  }
}

TEST(Select, RandomBitPatterns) {
  const auto any = [](std::size_t, std::mt19937& engine) {
    const auto bits = static_cast<std::uint32_t>(engine());
    float value = 0.0F;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  std::vector<std::vector<float>> rows;
  for (std::size_t length = 900; length < 920; ++length) {
    rows.push_back(filled(length, any));
  }
  expect_as_sorted(rows, 910);
}

}  // namespace
}  // namespace echo::reference_test
