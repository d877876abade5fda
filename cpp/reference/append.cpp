// append: maps first, on one thread (they decide whether the step fits at all), then bytes, rows in
// parallel. A row is encoded straight into its host row; its slot gets a copy of those bytes, so
// the two cannot differ.
#include "reference/append.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "echo/errors.hpp"
#include "reference/cache_ops.hpp"
#include "reference/float_io.hpp"
#include "reference/index_keys.hpp"
#include "reference/row_codec.hpp"
#include "reference/step_rows.hpp"

namespace echo {
namespace {

struct NewRow {
  std::int32_t row;  ///< of the pass
  std::int32_t host_row;
};

std::vector<NewRow> new_rows(const AppendParams& params) {
  std::vector<NewRow> rows;
  for (std::int32_t row = 0; row < params.step.rows; ++row) {
    const std::int32_t position = position_of(params.step, row);
    if (position != kNone) {
      rows.push_back({.row = row, .host_row = host_row_of(params.layer, params.step, row, position)});
    }
  }
  std::vector<std::int32_t> targets;
  for (const NewRow& row : rows) {
    targets.push_back(row.host_row);
  }
  std::ranges::sort(targets);
  if (const auto twice = std::ranges::adjacent_find(targets); twice != targets.end()) {
    throw StateError("positions: two rows of the pass are to be written to host row " + std::to_string(*twice));
  }
  return rows;
}

/// Slots for the new rows. One that is left from a pass that failed after its append is kept.
void map_to_slots(const AppendParams& params, const std::vector<NewRow>& rows) {
  CacheOps cache(params.layer);
  cache.begin(*params.step.tick);
  std::vector<std::int32_t> missing;
  for (const NewRow& row : rows) {
    if (const std::int32_t slot = cache.lookup(row.host_row); slot != kNone) {
      cache.protect(slot);
    } else {
      missing.push_back(row.host_row);
    }
  }
  cache.allocate(missing);
  params.layer.counters->appended += static_cast<std::int64_t>(rows.size());
}

/// Without slots of their own, new rows must not be found in slots that hold what was there before.
void unmap(const AppendParams& params, const std::vector<NewRow>& rows) {
  CacheOps cache(params.layer);
  for (const NewRow& row : rows) {
    cache.release(row.host_row);
  }
}

void write_row(const AppendParams& params, const NewRow& target, std::vector<float>& values) {
  const LayerView& layer = params.layer;
  const auto bytes = static_cast<std::size_t>(layer.row_bytes);
  std::byte* host = row_address(layer.slab, target.host_row, layer.host_stride);
  if (params.kv_dtype == DType::u8) {
    const auto* rows = static_cast<const std::byte*>(params.kv);
    std::memcpy(host, row_address(rows, target.row, layer.row_bytes), bytes);
  } else {
    const std::int64_t dim = params.shape.latent_dim + params.shape.rope_dim;
    values.resize(static_cast<std::size_t>(dim));
    load_floats(params.kv, params.kv_dtype, target.row * dim, dim, values.data());
    encode_row(values.data(), params.shape, host);
  }
  if (const std::int32_t slot = layer.slot_of[target.host_row]; slot != kNone) {
    std::memcpy(row_address(layer.pool, slot, layer.row_bytes), host, bytes);
  }
}

void write_index_key(const AppendParams& params, const NewRow& target, std::vector<float>& values) {
  const std::int64_t dim = params.shape.index_dim;
  values.resize(static_cast<std::size_t>(dim));
  load_floats(params.index_key, params.index_key_dtype, target.row * dim, dim, values.data());
  std::byte* block =
      row_address(params.layer.index_keys, target.host_row / kTokensPerBlock, params.layer.index_block_bytes);
  encode_index_key(values.data(), params.shape, block, target.host_row % kTokensPerBlock);
}

}  // namespace

void append_rows(ThreadPool& pool, const AppendParams& params) {
  const std::vector<NewRow> rows = new_rows(params);
  if (params.to_slots) {
    map_to_slots(params, rows);
  } else {
    unmap(params, rows);
  }
  pool.parallel_for(static_cast<std::int64_t>(rows.size()), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> values;
    for (std::int64_t i = begin; i < end; ++i) {
      const NewRow& row = rows[static_cast<std::size_t>(i)];
      write_row(params, row, values);
      if (params.index_key != nullptr) {
        write_index_key(params, row, values);
      }
    }
  });
}

}  // namespace echo
