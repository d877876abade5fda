#pragma once
// A layer of raw rows whose residency state is checked after every verb.

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "reference_world.hpp"

namespace echo::reference_test {

inline constexpr std::int32_t kTopK = 8;

/// Bytes that tell rows and their versions apart.
inline std::vector<std::byte> row_pattern(std::int32_t host_row, std::int32_t version, std::size_t bytes) {
  std::vector<std::byte> row(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    row[i] = static_cast<std::byte>(static_cast<std::size_t>(host_row * 131 + version * 17) + i * 7);
  }
  return row;
}

inline bool equal(std::span<const std::byte> a, std::span<const std::byte> b) { return std::ranges::equal(a, b); }

/// Scores of a block and k-th scores of a pass, empty where nothing is scored.
struct Scores {
  std::vector<float> scores;
  std::vector<float> kth;
};

/// A raw-row layer with verbs, each checked for the invariants afterwards.
class Cache {
 public:
  explicit Cache(const WorldSizes& sizes, std::int64_t threads = 1)
      : world(small_shape(RowFormat::raw, IndexKeyFormat::fp32, kTopK), sizes), backend_(threads) {}

  /// `claims`: new rows get slots, as in a decode step.
  void begin(bool claims = false) {
    const LayerView layer = world.layer();
    const std::span<const LayerView> layers(&layer, claims ? 1 : 0);
    try {
      backend_.begin({.step = world.step(), .host_blocks = world.sizes.host_blocks, .layers = layers});
    } catch (...) {
      check();
      throw;
    }
    check();
  }

  void append(std::int32_t version = 0) {
    const std::vector<std::byte> kv = new_rows(version);
    backend_.append({.layer = world.layer(),
                     .step = world.step(),
                     .shape = world.shape,
                     .kv = kv.data(),
                     .kv_dtype = DType::u8,
                     .index_key = nullptr,
                     .index_key_dtype = DType::f32});
    check();
  }

  std::vector<std::int32_t> recall(const std::vector<std::int32_t>& selection) {
    return recall(selection, world.all_rows());
  }
  std::vector<std::int32_t> recall(const std::vector<std::int32_t>& selection, BlockView block) {
    return recall(selection, block, {}, {});
  }
  /// Appends the rows of the pass too, which begin has given slots.
  std::vector<std::int32_t> append_and_recall(const std::vector<std::int32_t>& selection, std::int32_t version,
                                              const Scores& scores = {}) {
    return recall(selection, world.all_rows(), new_rows(version), scores);
  }
  std::vector<std::int32_t> recall(const std::vector<std::int32_t>& selection, BlockView block,
                                   const std::vector<std::byte>& kv, const Scores& scores) {
    std::vector<std::int32_t> slots(selection.size(), 1 << 30);
    try {
      backend_.recall({.layer = world.layer(),
                       .step = world.step(),
                       .block = block,
                       .shape = world.shape,
                       .selection = selection.data(),
                       .slots = slots.data(),
                       .scores = scores.scores.empty() ? nullptr : scores.scores.data(),
                       .score_stride = world.sizes.table_stride * kTokensPerBlock,
                       .kth_score = scores.kth.empty() ? nullptr : scores.kth.data(),
                       .kv = kv.empty() ? nullptr : kv.data(),
                       .kv_dtype = DType::u8});
    } catch (...) {
      check();
      throw;
    }
    check();
    return slots;
  }

  void release(std::vector<RowRun> runs) {
    const LayerView layer = world.layer();
    backend_.release({&layer, 1}, runs);
    check();
  }

  std::int32_t host_row_of_pass(std::size_t row) const {
    const std::int32_t position = world.positions[row];
    return position == kNone ? kNone
                             : world.host_row_at(static_cast<std::int32_t>(row) / world.sizes.query_rows, position);
  }

  /// Maps are inverse, stamps fit them, and the stack holds the free slots, each once.
  void check() {
    const ReplacementState& state = world.replacement;
    ASSERT_TRUE(state.free >= 0 && state.free <= world.sizes.slots) << state.free;
    EXPECT_TRUE(state.hand >= 0 && state.hand < world.sizes.slots) << state.hand;
    std::vector<std::int32_t> stack(world.free_slots.begin(), world.free_slots.begin() + state.free);
    std::vector<std::int32_t> free;
    for (std::int32_t slot = 0; slot < world.sizes.slots; ++slot) {
      const std::int32_t row = world.host_of[static_cast<std::size_t>(slot)];
      const std::int32_t stamp = world.stamp[static_cast<std::size_t>(slot)];
      EXPECT_EQ(row == kNone, stamp == kFree) << slot;
      if (row != kNone) {
        EXPECT_EQ(world.slot_of[static_cast<std::size_t>(row)], slot);
      } else {
        free.push_back(slot);
      }
    }
    std::ranges::sort(stack);
    EXPECT_EQ(stack, free);
    for (std::size_t row = 0; row < world.slot_of.size(); ++row) {
      const std::int32_t slot = world.slot_of[row];
      if (slot != kNone) {
        EXPECT_EQ(world.host_of[static_cast<std::size_t>(slot)], static_cast<std::int32_t>(row));
      }
    }
  }

  World world;

 private:
  /// Encoded rows of the pass.
  std::vector<std::byte> new_rows(std::int32_t version) const {
    const auto bytes = static_cast<std::size_t>(row_bytes_of(world.shape));
    std::vector<std::byte> kv;
    for (std::size_t row = 0; row < world.positions.size(); ++row) {
      const auto pattern = row_pattern(host_row_of_pass(row), version, bytes);
      kv.insert(kv.end(), pattern.begin(), pattern.end());
    }
    return kv;
  }

  CpuBackend backend_;
};

}  // namespace echo::reference_test
