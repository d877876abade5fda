// The stages of attend_sm90, and for what it is chosen. The first of these tests that fails says where to look.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <utility>

#include "cuda_mla_stages.hpp"
#include "echo/errors.hpp"
#include "kernels/attend_sm90.hpp"
#include "kernels/mla_work.cuh"
#include "kernels/number_formats.hpp"
#include "runtime/backends.hpp"

namespace echo::mla_stages {
namespace {

using namespace mla;

/// How rows are stored, and whether the kernel is the one for selections that are one split.
struct Way {
  RowFormat format;
  bool whole;
};

class CudaMlaStages : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    int major = 0;
    if (cuda_device_count() == 0 ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major != 9) {
      GTEST_SKIP() << "no Hopper GPU";
    }
  }
};

bool same(std::uint16_t a, std::uint16_t b) {
  const float x = from_bf16(a);
  const float y = from_bf16(b);
  return x == y || (std::isnan(x) && std::isnan(y));
}

/// Every element of the first tile, where the swizzle puts it; the message names the first that is wrong.
void expect_rows(const Case& input, const Result& result) {
  for (int entry = 0; entry < kTile; ++entry) {
    if (result.entries[static_cast<std::size_t>(entry / kHalf)] == 0) {
      continue;  // a half without rows is passed over
    }
    const std::int32_t slot = input.slots[static_cast<std::size_t>(entry)];
    const int row = entry % kHalf;
    for (int i = 0; i < kRowDim; ++i) {
      const int place = entry / kHalf * static_cast<int>(kMatrixBytes) + i / 64 * static_cast<int>(kAtomBytes) +
                        row * 128 + (((i % 64 / 8) ^ (row % 8)) * 16) + i % 8 * 2;
      std::uint16_t got = 0;
      std::memcpy(&got, result.rows.data() + place, 2);
      const std::uint16_t expected = slot == kNone ? std::uint16_t{0} : input.element(slot, i);
      ASSERT_TRUE(same(got, expected)) << "entry " << entry << " (slot " << slot << "), element " << i << ", byte "
                                       << place << " of the tile: " << std::hex << got << " instead of " << expected;
    }
  }
}

TEST_P(CudaMlaStages, RowsLieWhereTheTensorCoresReadThem) {
  const Case input(GetParam().format, 1, 1);
  const Result result = run(Stage::rows, input, GetParam().whole);
  expect_rows(input, result);
  EXPECT_EQ(result.entries, (std::vector<std::uint64_t>{~0ULL, ~0ULL}));
}

TEST_P(CudaMlaStages, EntriesWithoutARowReadAsZeros) {
  Case input(GetParam().format, 1, 2);
  std::mt19937 engine(3);
  for (std::size_t i = 0; i < input.slots.size(); ++i) {
    if (i % kHalf > 60 || engine() % 3 == 0) {
      input.slots[i] = kNone;
    }
  }
  const Result result = run(Stage::rows, input, GetParam().whole);
  expect_rows(input, result);
  for (int entry = 0; entry < kTile; ++entry) {
    EXPECT_EQ(result.entries[static_cast<std::size_t>(entry / kHalf)] >> (entry % kHalf) & 1U,
              input.slots[static_cast<std::size_t>(entry)] == kNone ? 0U : 1U)
        << entry;
  }
  input.slots.assign(kTile, kNone);
  const Result empty = run(Stage::rows, input, GetParam().whole);
  EXPECT_EQ(empty.entries, (std::vector<std::uint64_t>{0, 0}));
}

TEST_P(CudaMlaStages, AnyCodeAndAnyScale) {
  const Case input(GetParam().format, 1, 4, true);  // NaN codes, scales that are no powers of two, or none at all
  expect_rows(input, run(Stage::rows, input, GetParam().whole));
}

TEST_P(CudaMlaStages, Logits) {
  const Case input(GetParam().format, 1, 5);
  const Result result = run(Stage::logits, input, GetParam().whole);
  for (int entry = 0; entry < kTile; ++entry) {
    for (int head = 0; head < kHeads; head += 3) {
      const double expected = input.logit(head, input.slots[static_cast<std::size_t>(entry)]);
      const float got =
          result.logits[static_cast<std::size_t>((entry / kHalf * kHeads + head) * kHalf + entry % kHalf)];
      ASSERT_NEAR(got, expected, 2e-3) << "head " << head << ", entry " << entry;
    }
  }
}

/// The sums of weights 2^(logit - reference), whatever the reference is, as long as it is near the largest logit.
void expect_sums(const Case& input, const Result& result) {
  for (int head = 0; head < kHeads; head += 7) {
    std::vector<double> logits;
    for (const std::int32_t slot : input.slots) {
      logits.push_back(slot == kNone ? -INFINITY
                                     : input.logit(head, slot) * static_cast<double>(kScale) * 1.4426950408889634);
    }
    const float reference = result.references[static_cast<std::size_t>(head)];
    ASSERT_EQ(reference, result.references[static_cast<std::size_t>(kHeads + head)]) << "head " << head;
    ASSERT_NEAR(reference, *std::ranges::max_element(logits) - 4.0, 4.001) << "head " << head;
    double sum = 0.0;
    std::vector<double> out(kLatent, 0.0);
    double largest = 0.0;
    for (std::size_t entry = 0; entry < input.slots.size(); ++entry) {
      if (input.slots[entry] == kNone) {
        continue;
      }
      const double weight = std::exp2(logits[entry] - static_cast<double>(reference));
      sum += weight;
      for (int i = 0; i < kLatent; ++i) {
        out[static_cast<std::size_t>(i)] +=
            weight * static_cast<double>(from_bf16(input.element(input.slots[entry], i)));
        largest = std::max(largest, std::abs(out[static_cast<std::size_t>(i)]));
      }
    }
    const float got_sum =
        result.sums[static_cast<std::size_t>(head)] + result.sums[static_cast<std::size_t>(kHeads + head)];
    ASSERT_NEAR(got_sum, sum, 4e-3 * sum) << "head " << head;
    for (int i = 0; i < kLatent; ++i) {
      ASSERT_NEAR(result.out[static_cast<std::size_t>(head * kLatent + i)], out[static_cast<std::size_t>(i)],
                  6e-3 * largest)
          << "head " << head << ", column " << i;
    }
  }
}

TEST_P(CudaMlaStages, SumsOfOneTile) {
  const Case input(GetParam().format, 1, 6);
  expect_sums(input, run(Stage::sums, input, GetParam().whole));
}

TEST_P(CudaMlaStages, SumsOfOneTileWithGaps) {
  Case input(GetParam().format, 1, 7);
  for (std::size_t i = 0; i < input.slots.size(); i += 3) {
    input.slots[i] = kNone;
  }
  expect_sums(input, run(Stage::sums, input, GetParam().whole));
}

TEST_P(CudaMlaStages, SumsOfSeveralTiles) {
  Case input(GetParam().format, 5, 8);
  std::fill_n(input.slots.begin() + kTile, kTile, kNone);  // one is passed over, the halves before and after are full
  expect_sums(input, run(Stage::sums, input, GetParam().whole));
}

TEST(CudaMlaPlan, TakesWhatTheKernelIsMadeFor) {
  int major = 0;
  if (cuda_device_count() == 0 || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
      major != 9) {
    GTEST_SKIP() << "no Hopper GPU";
  }
  ShapeView shape{};
  shape.query_heads = 128;
  shape.latent_dim = kLatent;
  shape.rope_dim = kRope;
  shape.top_k = 2048;
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152}) {
    shape.row_format = format;
    for (const std::int32_t splits : {1, 2, 3, 5, 8, 16}) {
      const AttendSm90Plan plan = plan_attend_sm90(shape, splits, 64, 0);
      EXPECT_EQ(plan.splits, splits);
      EXPECT_GE(plan.teams * splits, 96) << "splits " << splits;  // most of the multiprocessors
      std::cout << to_string(format) << ", " << splits << " splits: " << plan.teams << " teams at once\n";
    }
    EXPECT_EQ(plan_attend_sm90(shape, 33, 64, 0).teams, 0);
  }
  shape.top_k = 2000;
  EXPECT_EQ(plan_attend_sm90(shape, 4, 64, 0).teams, 0);
  shape.top_k = 2048;
  shape.row_format = RowFormat::fp32;
  EXPECT_EQ(plan_attend_sm90(shape, 4, 64, 0).teams, 0);
}

TEST(CudaMlaPlan, TeamsHaveOneItemEachWhereThereAreEnough) {
  ShapeView shape{};
  shape.query_heads = 128;
  shape.top_k = 2048;
  const auto teams = [&](std::int32_t rows, std::int32_t splits, std::int32_t at_once) {
    return Work::of(shape, rows, splits, at_once).teams();
  };
  EXPECT_EQ(teams(1, 4, 33), Teams::once);
  EXPECT_EQ(teams(16, 4, 33), Teams::once);
  EXPECT_EQ(teams(17, 4, 33), Teams::deal);
  EXPECT_EQ(teams(33, 4, 33), Teams::deal);  // two each
  EXPECT_EQ(teams(66, 1, 132), Teams::once);
}

TEST(CudaMlaPlan, TakesAsManyRowsAsItCanTellApart) {
  ShapeView shape{};
  shape.latent_dim = kLatent;
  shape.rope_dim = kRope;
  shape.top_k = 64;
  shape.row_format = RowFormat::fp8_656;
  for (const auto& [heads, most] : {std::pair{64, 65535}, {128, 46340}, {4096, 8191}}) {
    shape.query_heads = heads;
    EXPECT_TRUE(suits_attend_sm90(shape, 1, most));
    EXPECT_FALSE(suits_attend_sm90(shape, 1, most + 1));
    for (std::int32_t rows = most - 2000; rows <= most; ++rows) {
      const Work work = Work::of(shape, rows, 1, 132);
      for (std::int32_t group = 0; group < (heads + 63) / 64; ++group) {
        for (const std::int32_t item : {group * rows, (group + 1) * rows - 1}) {  // as on the device
          ASSERT_EQ(std::uint64_t{static_cast<std::uint32_t>(item)} * work.part_of_rows >> 32,
                    static_cast<std::uint64_t>(group))
              << "item " << item << " of " << rows << " rows";
        }
      }
    }
  }
}

TEST(CudaMlaPlan, RefusesArraysThatAreNotAligned) {
  AttendParams p{};
  alignas(16) static float memory[8];
  const LaunchContext nowhere{nullptr, 0, {nullptr}};
  p.q = memory + 1;
  p.out = memory;
  EXPECT_THROW(launch_attend_sm90(p, {.splits = 1, .teams = 1}, {}, nowhere), InvalidArgument);
  p.q = memory;
  p.out = memory + 1;
  EXPECT_THROW(launch_attend_sm90(p, {.splits = 1, .teams = 1}, {}, nowhere), InvalidArgument);
  p.out = memory;
  p.slots = reinterpret_cast<const std::int32_t*>(memory) + 1;
  EXPECT_THROW(launch_attend_sm90(p, {.splits = 1, .teams = 1}, {}, nowhere), InvalidArgument);
}

std::string name_of(const ::testing::TestParamInfo<Way>& parameter) {
  return std::string(to_string(parameter.param.format)) + (parameter.param.whole ? "_whole" : "");
}
INSTANTIATE_TEST_SUITE_P(Formats, CudaMlaStages,
                         ::testing::Values(Way{RowFormat::fp8_656, false}, Way{RowFormat::fp8_656, true},
                                           Way{RowFormat::bf16_1152, false}),
                         name_of);

}  // namespace
}  // namespace echo::mla_stages
