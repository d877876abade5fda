// append: maps first, on one thread (they decide whether the step fits at all), then bytes, rows in
// parallel.
#include "reference/append.hpp"

#include <vector>

#include "reference/cache_ops.hpp"
#include "reference/float_io.hpp"
#include "reference/index_keys.hpp"
#include "reference/new_rows.hpp"

namespace echo {
namespace {

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

void write_index_keys(ThreadPool& pool, const AppendParams& params, const std::vector<NewRow>& rows) {
  const std::int64_t dim = params.shape.index_dim;
  pool.parallel_for(static_cast<std::int64_t>(rows.size()), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> values(static_cast<std::size_t>(dim));
    for (std::int64_t i = begin; i < end; ++i) {
      const NewRow& target = rows[static_cast<std::size_t>(i)];
      load_floats(params.index_key, params.index_key_dtype, target.row * dim, dim, values.data());
      std::byte* block =
          row_address(params.layer.index_keys, target.host_row / kTokensPerBlock, params.layer.index_block_bytes);
      encode_index_key(values.data(), params.shape, block, target.host_row % kTokensPerBlock);
    }
  });
}

}  // namespace

void append_rows(ThreadPool& pool, const AppendParams& params) {
  const std::vector<NewRow> rows = new_rows(params.layer, params.step);
  if (params.kv != nullptr) {
    if (params.to_slots) {
      map_to_slots(params, rows);
    } else {
      unmap(params, rows);
    }
    write_rows(pool, params.layer, params.shape, params.kv, params.kv_dtype, rows);
  }
  if (params.index_key != nullptr) {
    write_index_keys(pool, params, rows);
  }
}

}  // namespace echo
