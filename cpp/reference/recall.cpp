// recall: look up and stamp all entries, so that no victim is a row that this block selects; then
// the misses, each host row once and in order of address, get slots and are copied in parallel;
// then the slots are written out. New rows, where they are appended here, come first: they are
// found like others then. Cost: O(entries) for the maps on one thread, row_bytes per miss for the
// copies.
#include "reference/recall.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "echo/errors.hpp"
#include "reference/cache_ops.hpp"
#include "reference/fetch.hpp"
#include "reference/new_rows.hpp"
#include "reference/step_rows.hpp"

namespace echo {
namespace {

/// Host row of each entry of the selection, kNone where it is kNone and on padding rows, whatever
/// those contain.
std::vector<std::int32_t> selected_host_rows(const RecallParams& params) {
  const std::int32_t k = params.shape.top_k;
  std::vector<std::int32_t> rows(static_cast<std::size_t>(params.block.count) * static_cast<std::size_t>(k), kNone);
  for (std::int32_t i = 0; i < params.block.count; ++i) {
    const std::int32_t row = params.block.first + i;
    const std::int32_t own = position_of(params.step, row);
    for (std::int32_t j = 0; j < k && own != kNone; ++j) {
      const std::int64_t entry = static_cast<std::int64_t>(i) * k + j;
      const std::int32_t position = params.selection[entry];
      if (position == kNone) {
        continue;
      }
      if (position < 0 || position > own) {
        throw InvalidArgument("selection: row " + std::to_string(row) + " selects position " +
                              std::to_string(position) + ", expected 0 to " + std::to_string(own) + " or -1");
      }
      rows[static_cast<std::size_t>(entry)] = host_row_of(params.layer, params.step, row, position);
    }
  }
  return rows;
}

}  // namespace

void recall_rows(ThreadPool& pool, const RecallParams& params) {
  const LayerView& layer = params.layer;
  const std::vector<std::int32_t> host_rows = selected_host_rows(params);
  const std::vector<NewRow> appended = params.kv == nullptr ? std::vector<NewRow>{} : new_rows(layer, params.step);
  CacheOps cache(layer);
  cache.begin(*params.step.tick + params.block.tick_offset);
  if (params.kv != nullptr) {
    write_rows(pool, layer, params.shape, params.kv, params.kv_dtype, appended);
  }

  std::vector<std::int32_t> missing;
  std::int64_t entries = 0;
  for (const std::int32_t row : host_rows) {
    if (row == kNone) {
      continue;
    }
    ++entries;
    if (const std::int32_t slot = cache.lookup(row); slot != kNone) {
      cache.protect(slot);
    } else {
      missing.push_back(row);
    }
  }
  std::ranges::sort(missing);
  missing.erase(std::ranges::unique(missing).begin(), missing.end());
  cache.allocate(missing, row_scores(params));
  fetch(pool, layer, missing);
  layer.counters->misses += std::ssize(missing);
  layer.counters->hits += entries - std::ssize(missing);

  std::ranges::transform(host_rows, params.slots,
                         [&](std::int32_t row) { return row == kNone ? kNone : cache.lookup(row); });
}

}  // namespace echo
