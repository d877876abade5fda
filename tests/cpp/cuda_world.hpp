#pragma once
// One layer with its memory and one batch, in the memory of any backend: the CPU's and the GPU's
// get the same calls and are compared. Which slots rows are in, and which rows are evicted, depends
// on timing on a GPU; nothing else does.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "cuda_arrays.hpp"
#include "cuda_shapes.hpp"
#include "echo/errors.hpp"
#include "echo/runtime_config.hpp"
#include "kernels/params.hpp"
#include "runtime/backend.hpp"
#include "runtime/backends.hpp"

namespace echo::cuda_test {

struct Sizes {
  std::int32_t slots = 64;
  std::int32_t batch = 2;
  std::int32_t query_rows = 1;
  std::int32_t table_stride = 4;  ///< blocks of a session
  std::int32_t splits = 4;
  std::int32_t forecast_cap = 0;
  std::int64_t score_stride() const { return static_cast<std::int64_t>(table_stride) * kTokensPerBlock; }
  std::int32_t rows() const { return batch * query_rows; }
  /// Every other block of the pool belongs to a session.
  std::int32_t host_blocks() const { return 2 * batch * table_stride; }
};

class World {
 public:
  static constexpr std::int32_t kHostPadding = 32;  ///< bytes between host rows

  World(Backend& backend_, const ShapeView& shape_, const Sizes& sizes_)
      : backend(backend_),
        shape(shape_),
        sizes(sizes_),
        slab(backend.host_memory(), static_cast<std::size_t>(host_rows() * (row_bytes_of(shape) + kHostPadding)),
             "slab"),
        pool(backend, bytes(static_cast<std::int64_t>(sizes.slots) * row_bytes_of(shape))),
        index_keys(backend, bytes(sizes.host_blocks() * index_block_bytes())),
        slot_of(backend, none(host_rows())),
        host_of(backend, none(sizes.slots)),
        stamp(backend, none(sizes.slots)),
        free_slots(backend, all_slots(sizes.slots)),
        replacement(backend, {{.hand = 0, .free = sizes.slots}}),
        counters(backend, std::vector<std::int64_t>(sizeof(LayerCounters) / 8, 0)),
        control(backend, none(control_words())),
        owners(backend, none(2 * sizes.host_blocks())),
        scores(backend, std::vector<float>(static_cast<std::size_t>(sizes.rows() * sizes.score_stride()),
                                           std::numeric_limits<float>::infinity())),
        selection(backend, std::vector<std::int32_t>(entries(), 1 << 30)),
        thresholds(backend, std::vector<float>(static_cast<std::size_t>(sizes.batch), NAN)),
        deviations(backend, std::vector<float>(static_cast<std::size_t>(sizes.batch), NAN)),
        kth_score(backend, std::vector<float>(static_cast<std::size_t>(sizes.rows()), NAN)),
        slots(backend, std::vector<std::int32_t>(entries(), 1 << 30)) {
    std::memset(slab.data(), 0xFF, slab.bytes());
    backend.prepare({.shape = shape,
                     .layers = 3,
                     .rows = sizes.rows(),
                     .block_rows = sizes.rows(),
                     .slots = sizes.slots,
                     .host_rows = host_rows(),
                     .splits = sizes.splits,
                     .entries = sizes.batch,
                     .forecast_cap = sizes.forecast_cap});
  }

  std::int64_t host_rows() const { return static_cast<std::int64_t>(sizes.host_blocks()) * kTokensPerBlock; }
  std::int64_t index_block_bytes() const {
    const std::int64_t elements = static_cast<std::int64_t>(kTokensPerBlock) * shape.index_dim;
    return shape.index_key_format == IndexKeyFormat::fp8 ? elements + 4 * kTokensPerBlock : 4 * elements;
  }
  std::size_t entries() const { return static_cast<std::size_t>(sizes.rows()) * static_cast<std::size_t>(shape.top_k); }

  LayerView layer() {
    return {.pool = pool.data(),
            .slab = slab.device(),
            .slot_of = slot_of.data(),
            .host_of = host_of.data(),
            .stamp = stamp.data(),
            .free_slots = free_slots.data(),
            .index_keys = index_keys.data(),
            .replacement = replacement.data(),
            .counters = reinterpret_cast<LayerCounters*>(counters.data()),
            .slots = sizes.slots,
            .row_bytes = row_bytes_of(shape),
            .host_rows = host_rows(),
            .host_stride = row_bytes_of(shape) + kHostPadding,
            .index_block_bytes = index_block_bytes()};
  }
  StepView step() const {
    const std::int32_t* words = control.data();
    return {.tick = words,
            .tokens = words + 4,
            .positions = words + 4,
            .session = words + 4 + sizes.rows(),
            .block_table = words + 4 + 2 * sizes.rows(),
            .rows = sizes.rows(),
            .query_rows = sizes.query_rows,
            .table_stride = sizes.table_stride,
            .owners = reinterpret_cast<BlockOwner*>(owners.data())};
  }
  BlockView all_rows() const { return {.first = 0, .count = sizes.rows(), .tick_offset = 0}; }

  /// Begins a pass: the rows' positions, sessions 0, 1, ..., tables of every other block. `claims`: new rows get slots,
  /// as in a decode step.
  void begin(std::int32_t tick, const std::vector<std::int32_t>& positions, bool claims = false) {
    upload(tick, positions);
    const LayerView own = layer();
    const std::span<const LayerView> layers(&own, claims ? 1 : 0);
    backend.begin({.step = step(), .host_blocks = sizes.host_blocks(), .layers = layers});
  }
  void upload(std::int32_t tick, const std::vector<std::int32_t>& positions) {
    std::vector<std::int32_t> words = none(control_words());
    words[0] = tick;
    std::ranges::copy(positions, words.begin() + 4);
    for (std::int32_t row = 0; row < sizes.rows(); ++row) {
      const bool padding = positions[static_cast<std::size_t>(row)] == kNone;
      words[static_cast<std::size_t>(4 + sizes.rows() + row)] = padding ? kNone : row / sizes.query_rows;
    }
    for (std::int32_t i = 0; i < sizes.batch * sizes.table_stride; ++i) {
      words[static_cast<std::size_t>(4 + 2 * sizes.rows() + i)] = block_at(i);
    }
    backend.upload_control(control.data(), words.data(), words.size() * sizeof(std::int32_t));
  }

  template <typename T, typename U>
  void append(const DeviceArray<T>& kv, DType kv_dtype, const DeviceArray<U>& keys, DType keys_dtype) {
    backend.append({.layer = layer(),
                    .step = step(),
                    .shape = shape,
                    .kv = kv.data(),
                    .kv_dtype = kv_dtype,
                    .index_key = keys.data(),
                    .index_key_dtype = keys_dtype});
  }
  SelectParams select_params(BlockView block) {
    return {.step = step(),
            .block = block,
            .shape = shape,
            .scores = scores.data(),
            .score_stride = sizes.score_stride(),
            .selection = selection.data(),
            .kth_score = kth_score.data()};
  }
  void select(BlockView block) { backend.select(select_params(block)); }
  /// `scored`: scores and k-th scores decide what is evicted.
  RecallParams recall_params(BlockView block, bool scored = false) {
    return {.layer = layer(),
            .step = step(),
            .block = block,
            .shape = shape,
            .selection = selection.data() + static_cast<std::int64_t>(block.first) * shape.top_k,
            .slots = slots.data(),
            .scores = scored ? scores.data() : nullptr,
            .score_stride = sizes.score_stride(),
            .kth_score = scored ? kth_score.data() : nullptr,
            .kv = nullptr,
            .kv_dtype = DType::f32};
  }
  void recall(BlockView block, bool scored = false) { backend.recall(recall_params(block, scored)); }
  /// Of the second of three layers, whose rows these are.
  void forecast(std::int32_t cap) {
    backend.forecast({.layer = layer(),
                      .step = step(),
                      .block = all_rows(),
                      .shape = shape,
                      .index = 1,
                      .scores = scores.data(),
                      .score_stride = sizes.score_stride(),
                      .kth_score = kth_score.data(),
                      .cap = cap});
  }
  /// Ends a pass.
  void commit() {
    backend.commit({.step = step(),
                    .layers = 1,
                    .kth_score = kth_score.data(),
                    .kth_stride = sizes.rows(),
                    .thresholds = thresholds.data(),
                    .deviations = deviations.data(),
                    .alpha = 0.5F});
  }
  template <typename T>
  void append_and_recall(const DeviceArray<T>& kv, DType kv_dtype, bool scored) {
    RecallParams params = recall_params(all_rows(), scored);
    params.kv = kv.data();
    params.kv_dtype = kv_dtype;
    backend.recall(params);
  }

  std::int32_t host_row_at(std::int32_t entry, std::int32_t position) const {
    return block_at(entry * sizes.table_stride + position / kTokensPerBlock) * kTokensPerBlock +
           position % kTokensPerBlock;
  }
  /// Host row in the slot of each entry of the last recall, kNone where there is none.
  std::vector<std::int32_t> recalled_rows() const {
    const std::vector<std::int32_t> rows = host_of.read();
    std::vector<std::int32_t> recalled = slots.read();
    for (std::int32_t& entry : recalled) {
      entry = entry == kNone ? kNone : rows[static_cast<std::size_t>(entry)];
    }
    return recalled;
  }
  /// Host rows that have a slot, ascending.
  std::vector<std::int32_t> resident_rows() const {
    std::vector<std::int32_t> rows = host_of.read();
    std::erase(rows, kNone);
    std::ranges::sort(rows);
    return rows;
  }
  /// How many of the rows of a pass have a slot.
  std::int32_t resident_new_rows(const std::vector<std::int32_t>& positions) const {
    const std::vector<std::int32_t> slot_of_row = slot_of.read();
    std::int32_t resident = 0;
    for (std::int32_t row = 0; row < sizes.rows(); ++row) {
      const std::int32_t position = positions[static_cast<std::size_t>(row)];
      if (position != kNone) {
        const std::int32_t block = row / sizes.query_rows * sizes.table_stride + position / kTokensPerBlock;
        const std::int32_t host_row = block_at(block) * kTokensPerBlock + position % kTokensPerBlock;
        resident += slot_of_row[static_cast<std::size_t>(host_row)] >= 0 ? 1 : 0;
      }
    }
    return resident;
  }
  LayerCounters counted() const {
    LayerCounters values{};
    backend.copy_to_host(&values, counters.data(), sizeof values);
    return values;
  }
  std::vector<std::byte> host_pool() {
    backend.synchronize();
    return {slab.data(), slab.data() + slab.bytes()};
  }

  /// Maps are inverse, stamps fit them, the stack holds the free slots, each once, and every slot has
  /// the bytes of its host row. If the pass is `begun` only, that does not hold for its new rows.
  void check(bool begun = false) {
    const std::int32_t new_row = begun ? new_row_at(control.read()[0]) : kNone;
    const std::vector<std::byte> host = host_pool();
    const std::vector<std::byte> rows = pool.read();
    const std::vector<std::int32_t> slot_of_row = slot_of.read();
    const std::vector<std::int32_t> row_of = host_of.read();
    const std::vector<std::int32_t> stamps = stamp.read();
    std::vector<std::int32_t> stack = free_slots.read();
    std::vector<std::int32_t> free;
    const auto bytes = static_cast<std::size_t>(row_bytes_of(shape));
    for (std::size_t slot = 0; slot < row_of.size(); ++slot) {
      const std::int32_t row = row_of[slot];
      ASSERT_EQ(row == kNone, stamps[slot] == kFree) << slot;
      if (row == kNone) {
        free.push_back(static_cast<std::int32_t>(slot));
        continue;
      }
      ASSERT_EQ(slot_of_row[static_cast<std::size_t>(row)], static_cast<std::int32_t>(slot)) << row;
      if (begun && stamps[slot] == new_row) {
        continue;
      }
      ASSERT_EQ(std::memcmp(rows.data() + slot * bytes,
                            host.data() + static_cast<std::size_t>(row) * (bytes + kHostPadding), bytes),
                0)
          << "row " << row << " in slot " << slot;
    }
    const auto mapped = std::ranges::count_if(slot_of_row, [](std::int32_t slot) { return slot >= 0; });
    ASSERT_EQ(mapped + std::ssize(free), std::ssize(row_of));
    stack.resize(static_cast<std::size_t>(replacement.read()[0].free));
    std::ranges::sort(stack);
    ASSERT_EQ(stack, free);
  }

  Backend& backend;
  ShapeView shape;
  Sizes sizes;
  Buffer slab;
  DeviceArray<std::byte> pool;
  DeviceArray<std::byte> index_keys;
  DeviceArray<std::int32_t> slot_of;
  DeviceArray<std::int32_t> host_of;
  DeviceArray<std::int32_t> stamp;
  DeviceArray<std::int32_t> free_slots;
  DeviceArray<ReplacementState> replacement;
  DeviceArray<std::int64_t> counters;
  DeviceArray<std::int32_t> control;
  DeviceArray<std::int32_t> owners;  ///< entry and index of each block
  DeviceArray<float> scores;
  DeviceArray<std::int32_t> selection;
  DeviceArray<float> thresholds;
  DeviceArray<float> deviations;
  DeviceArray<float> kth_score;
  DeviceArray<std::int32_t> slots;

 private:
  static std::vector<std::byte> bytes(std::int64_t count) {
    return std::vector<std::byte>(static_cast<std::size_t>(count), std::byte{0xFF});
  }
  static std::vector<std::int32_t> none(std::int64_t count) {
    return std::vector<std::int32_t>(static_cast<std::size_t>(count), kNone);
  }
  static std::vector<std::int32_t> all_slots(std::int32_t slots) {
    std::vector<std::int32_t> stack(static_cast<std::size_t>(slots));
    std::iota(stack.rbegin(), stack.rend(), 0);
    return stack;
  }
  static std::int32_t block_at(std::int32_t table_entry) { return 2 * table_entry + 1; }
  std::int64_t control_words() const {
    return 4 + 2 * sizes.rows() + static_cast<std::int64_t>(sizes.batch) * sizes.table_stride;
  }
};

}  // namespace echo::cuda_test
