// sift: what a GPU does while it scores, done afterwards. Rows in parallel: list candidates. Then, on one thread, rows
// and positions in order, those above the upper bound that have no slot get one, under the cap; their bytes are copied
// in parallel. Cost: O(length) per row.
#include "reference/sift.hpp"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "kernels/prediction.hpp"
#include "reference/cache_ops.hpp"
#include "reference/fetch.hpp"
#include "reference/step_rows.hpp"

namespace echo {
namespace {

/// A row of the block, as far as it is sifted.
struct Row {
  const float* scores;
  std::int32_t row;      ///< of the pass
  std::int32_t visible;  ///< tokens
};

void list_candidates(const Row& row, const SiftView& view, RowSift& sift, ScoredToken* tokens) {
  for (std::int32_t s = 0; s < row.visible; ++s) {
    const std::uint32_t key = ordered_key(row.scores[s]);
    if (key >= sift.candidates) {
      if (sift.found < view.capacity) {
        tokens[sift.found] = {.key = key, .position = s};
      }
      ++sift.found;
    }
  }
  sift.compared = row.visible;
}

/// Padding rows and rows that select all they see have nothing to sift, nor have those without a prediction.
void sift_row(const ScoreParams& params, std::int32_t i) {
  const Row row{.scores = params.scores + i * params.score_stride,
                .row = params.block.first + i,
                .visible = position_of(params.step, params.block.first + i) + 1};
  const SiftView& view = params.sift;
  const std::int32_t session = params.step.session[row.row];
  if (row.visible <= params.shape.top_k || session == kNone) {
    return;
  }
  const std::int64_t place = session * view.predicted_stride;
  const SiftBounds bounds = sift_bounds(view.thresholds[place], view.deviations[place]);
  if (bounds.candidates != bounds.candidates) {
    return;
  }
  RowSift& sift = view.rows[i];
  sift.candidates = ordered_key(bounds.candidates);
  sift.prefetch = ordered_key(bounds.prefetch);
  list_candidates(row, view, sift, view.tokens + static_cast<std::int64_t>(i) * view.capacity);
}

/// Host rows above the upper bounds that have no slot, each once. (New rows have slots since begin.)
std::vector<std::int32_t> wanted_rows(const ScoreParams& params) {
  std::vector<std::int32_t> wanted;
  std::unordered_set<std::int32_t> seen;  // rows of the pass may share host rows
  for (std::int32_t i = 0; i < params.block.count; ++i) {
    const RowSift& sift = params.sift.rows[i];
    const std::int32_t row = params.block.first + i;
    const float* scores = params.scores + i * params.score_stride;
    for (std::int32_t s = 0; s < sift.compared; ++s) {
      if (ordered_key(scores[s]) >= sift.prefetch) {
        const std::int32_t host_row = host_row_of(params.layer, params.step, row, s);
        if (params.layer.slot_of[host_row] == kNone && seen.insert(host_row).second) {
          wanted.push_back(host_row);
        }
      }
    }
  }
  return wanted;
}

void prefetch(ThreadPool& pool, const ScoreParams& params) {
  const SiftView& view = params.sift;
  std::vector<std::int32_t> rows = wanted_rows(params);
  std::int64_t scored = 0;
  // The bounds of prefetch stand for k-th scores: what is at or above them will probably be selected, and stays.
  std::vector<float> least(static_cast<std::size_t>(params.step.rows), float_of(kFloatNan));
  for (std::int32_t i = 0; i < params.block.count; ++i) {
    const RowSift& sift = view.rows[i];
    scored += position_of(params.step, params.block.first + i) + 1;
    if (sift.candidates != 0) {
      least[static_cast<std::size_t>(params.block.first + i)] = value_of_key(sift.prefetch);
    }
  }
  const auto cap = static_cast<std::size_t>(static_cast<double>(view.prefetch_cap) * static_cast<double>(scored));
  if (rows.size() > cap) {
    params.layer.counters->prefetches_capped += std::ssize(rows) - static_cast<std::ptrdiff_t>(cap);
    rows.resize(cap);
  }
  CacheOps cache(params.layer);
  cache.begin(*params.step.tick + params.block.tick_offset);
  rows.resize(cache.prefetch(rows, {.scores = params.scores,
                                    .score_stride = params.score_stride,
                                    .kth_score = least.data(),
                                    .step = params.step,
                                    .block = params.block}));
  fetch(pool, params.layer, rows);
  *view.prefetched = static_cast<std::int32_t>(rows.size());
  params.layer.counters->prefetched += std::ssize(rows);
}

}  // namespace

void sift_rows(ThreadPool& pool, const ScoreParams& params) {
  const SiftView& view = params.sift;
  std::fill_n(view.next_rows, params.block.count, RowSift{});
  *view.next_prefetched = 0;
  pool.parallel_for(params.block.count, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      sift_row(params, static_cast<std::int32_t>(i));
    }
  });
  for (std::int32_t i = 0; i < params.block.count; ++i) {
    params.layer.counters->candidates += std::min(view.rows[i].found, view.capacity);
  }
  if (view.prefetch_cap > 0.0F) {
    prefetch(pool, params);
  }
}

}  // namespace echo
