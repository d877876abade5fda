#include "reference/new_rows.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "echo/errors.hpp"
#include "reference/cache_ops.hpp"
#include "reference/float_io.hpp"
#include "reference/row_codec.hpp"
#include "reference/step_rows.hpp"

namespace echo {

std::vector<NewRow> new_rows(const LayerView& layer, const StepView& step) {
  std::vector<NewRow> rows;
  for (std::int32_t row = 0; row < step.rows; ++row) {
    const std::int32_t position = position_of(step, row);
    if (position != kNone) {
      rows.push_back({.row = row, .host_row = host_row_of(layer, step, row, position)});
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

void claim_new_rows(ThreadPool& pool, const BeginParams& params) {
  pool.parallel_for(std::ssize(params.layers), [&](std::int64_t begin, std::int64_t end) {
    for (const LayerView& layer :
         params.layers.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin))) {
      CacheOps cache(layer);
      cache.begin(*params.step.tick);
      std::vector<std::int32_t> missing;
      for (const NewRow& row : new_rows(layer, params.step)) {
        if (const std::int32_t slot = cache.lookup(row.host_row); slot != kNone) {
          cache.protect(slot);
        } else {
          missing.push_back(row.host_row);
        }
      }
      cache.allocate_new(missing);
    }
  });
}

void write_rows(ThreadPool& pool, const LayerView& layer, const ShapeView& shape, const void* kv, DType kv_dtype,
                const std::vector<NewRow>& rows) {
  for (const NewRow& row : rows) {
    layer.counters->appended += layer.slot_of[row.host_row] != kNone ? 1 : 0;
  }
  const auto bytes = static_cast<std::size_t>(layer.row_bytes);
  const std::int64_t dim = shape.latent_dim + shape.rope_dim;
  pool.parallel_for(static_cast<std::int64_t>(rows.size()), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> values(static_cast<std::size_t>(dim));
    for (std::int64_t i = begin; i < end; ++i) {
      const NewRow& target = rows[static_cast<std::size_t>(i)];
      std::byte* host = row_address(layer.slab, target.host_row, layer.host_stride);
      if (kv_dtype == DType::u8) {
        std::memcpy(host, row_address(static_cast<const std::byte*>(kv), target.row, layer.row_bytes), bytes);
      } else {
        load_floats(kv, kv_dtype, target.row * dim, dim, values.data());
        encode_row(values.data(), shape, host);
      }
      if (const std::int32_t slot = layer.slot_of[target.host_row]; slot != kNone) {
        std::memcpy(row_address(layer.pool, slot, layer.row_bytes), host, bytes);
      }
    }
  });
}

}  // namespace echo
