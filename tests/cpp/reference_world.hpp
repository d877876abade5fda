#pragma once
// One layer with its memory and one batch, for tests of the CPU backend's verbs. Every piece of
// memory is an allocation of its own, so that the address sanitizer sees what goes beyond it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "kernels/params.hpp"
#include "reference/cpu_backend.hpp"

namespace echo::reference_test {

inline ShapeView small_shape(RowFormat rows, IndexKeyFormat keys, std::int32_t top_k = 8) {
  return {.index_heads = 8,
          .index_dim = 32,
          .query_heads = 6,
          .latent_dim = rows == RowFormat::fp32 ? 32 : 512,
          .rope_dim = rows == RowFormat::fp32 ? 16 : 64,
          .top_k = top_k,
          .row_format = rows,
          .index_key_format = keys};
}

inline std::int32_t row_bytes_of(const ShapeView& shape) {
  const std::int32_t dim = shape.latent_dim + shape.rope_dim;
  switch (shape.row_format) {
    case RowFormat::fp8_656:
      return 656;
    case RowFormat::bf16_1152:
      return 2 * dim;
    case RowFormat::fp32:
      return 4 * dim;
    case RowFormat::raw:
      return 48;
  }
  return 0;
}

/// Sizes of a World.
struct WorldSizes {
  std::int32_t slots = 64;
  std::int32_t host_blocks = 4;
  std::int32_t batch = 1;
  std::int32_t query_rows = 1;
  std::int32_t table_stride = 4;
  std::int32_t padding_bytes = 16;  ///< between host rows
};

class World {
 public:
  World(const ShapeView& shape_, const WorldSizes& sizes_)
      : shape(shape_),
        sizes(sizes_),
        pool(bytes(sizes.slots, row_bytes_of(shape)), std::byte{0xFF}),
        slab(bytes(sizes.host_blocks * 64, row_bytes_of(shape) + sizes.padding_bytes), std::byte{0xFF}),
        index_keys(bytes(sizes.host_blocks, index_block_bytes()), std::byte{0xFF}),
        slot_of(bytes(sizes.host_blocks, 64), kNone),
        host_of(bytes(sizes.slots, 1), kNone),
        stamp(bytes(sizes.slots, 1), kFree),
        free_slots(bytes(sizes.slots, 1)),
        replacement{.hand = 0, .free = sizes.slots},
        owners(bytes(sizes.host_blocks, 1), BlockOwner{kNone, kNone}),
        positions(bytes(sizes.batch, sizes.query_rows), kNone),
        session(positions.size(), kNone),
        tokens(positions.size(), 0),
        block_table(bytes(sizes.batch, sizes.table_stride), kNone) {
    std::iota(free_slots.rbegin(), free_slots.rend(), 0);
    // Neighbouring blocks of a session are not neighbours on the host.
    for (std::size_t i = 0; i < block_table.size(); ++i) {
      block_table[i] = static_cast<std::int32_t>((i * 5 + 1) % static_cast<std::size_t>(sizes.host_blocks));
    }
  }

  LayerView layer() {
    return {.pool = pool.data(),
            .slab = slab.data(),
            .slot_of = slot_of.data(),
            .host_of = host_of.data(),
            .stamp = stamp.data(),
            .free_slots = free_slots.data(),
            .index_keys = index_keys.data(),
            .replacement = &replacement,
            .counters = &counters,
            .slots = sizes.slots,
            .row_bytes = row_bytes_of(shape),
            .host_rows = static_cast<std::int64_t>(slot_of.size()),
            .host_stride = row_bytes_of(shape) + sizes.padding_bytes,
            .index_block_bytes = index_block_bytes()};
  }
  StepView step() {
    return {.tick = &tick,
            .tokens = tokens.data(),
            .positions = positions.data(),
            .session = session.data(),
            .block_table = block_table.data(),
            .rows = static_cast<std::int32_t>(positions.size()),
            .query_rows = sizes.query_rows,
            .table_stride = sizes.table_stride,
            .owners = owners.data()};
  }
  /// Slots that hold a row.
  std::int32_t used() const { return sizes.slots - replacement.free; }
  BlockView all_rows() const {
    return {.first = 0, .count = static_cast<std::int32_t>(positions.size()), .tick_offset = 0};
  }
  std::int32_t index_block_bytes() const {
    return shape.index_key_format == IndexKeyFormat::fp8 ? 64 * (shape.index_dim + 4) : 64 * 4 * shape.index_dim;
  }
  std::int32_t host_row_at(std::int32_t entry, std::int32_t position) const {
    return host_row(block_table.data() + entry * sizes.table_stride, position);
  }
  std::span<const std::byte> slot_bytes(std::int32_t slot) {
    return {row_address(pool.data(), slot, row_bytes_of(shape)), static_cast<std::size_t>(row_bytes_of(shape))};
  }
  std::span<std::byte> host_bytes(std::int32_t row) {
    return {row_address(slab.data(), row, layer().host_stride), static_cast<std::size_t>(row_bytes_of(shape))};
  }

  ShapeView shape;
  WorldSizes sizes;
  std::vector<std::byte> pool;
  std::vector<std::byte> slab;
  std::vector<std::byte> index_keys;
  std::vector<std::int32_t> slot_of;
  std::vector<std::int32_t> host_of;
  std::vector<std::int32_t> stamp;
  std::vector<std::int32_t> free_slots;
  ReplacementState replacement;
  LayerCounters counters{};
  std::vector<BlockOwner> owners;
  std::int32_t tick = 1;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> session;
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> block_table;

 private:
  static std::size_t bytes(std::int64_t count, std::int64_t each) { return static_cast<std::size_t>(count * each); }
};

inline std::vector<float> normal_floats(std::size_t count, unsigned seed, float spread = 1.0F) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(engine);
  }
  return values;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace echo::reference_test
