// forecast: exact ranks. Entries in parallel: the tokens of rank top_k to top_k + forecast_reach, ties to the smaller
// position as in select, and of them those that are not resident. Then, on one thread, all entries' best rows, their
// second best and so on get slots, and bytes are copied in parallel. What is not a finite way below the k-th score is
// no likelier than anything else and left out. Cost: O(length) per entry, and a sort of those that just missed.
#include "reference/forecast.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <unordered_set>
#include <vector>

#include "kernels/number_formats.hpp"
#include "reference/cache_ops.hpp"
#include "reference/fetch.hpp"
#include "reference/step_rows.hpp"

namespace echo {
namespace {

/// A row that the next step may want.
struct NearRow {
  std::int32_t host_row;
  float distance;  ///< below the k-th score
};

/// Tokens of a row that just missed the selection, best first.
std::vector<ScoredToken> just_missed(std::span<const float> scores, std::int32_t top_k) {
  std::vector<ScoredToken> tokens(scores.size());
  for (std::size_t s = 0; s < scores.size(); ++s) {
    tokens[s] = {.key = ordered_key(scores[s]), .position = static_cast<std::int32_t>(s)};
  }
  const auto better = [](const ScoredToken& a, const ScoredToken& b) {
    return a.key != b.key ? a.key > b.key : a.position < b.position;
  };
  const auto first = tokens.begin() + top_k;
  const auto last = first + std::min<std::ptrdiff_t>(forecast_reach(top_k), tokens.end() - first);
  std::nth_element(tokens.begin(), first, tokens.end(), better);
  std::partial_sort(first, last, tokens.end(), better);
  return {first, last};
}

/// The best rows of an entry that are not resident; `row` is its last one in the block.
std::vector<NearRow> near_rows(const ForecastParams& params, std::int32_t row) {
  const std::int32_t visible = position_of(params.step, row) + 1;
  const float kth = params.kth_score[row];
  if (visible <= params.shape.top_k || std::isnan(kth)) {
    return {};
  }
  const float* scores = params.scores + (row - params.block.first) * params.score_stride;
  std::vector<NearRow> rows;
  for (const ScoredToken& token : just_missed({scores, static_cast<std::size_t>(visible)}, params.shape.top_k)) {
    const float distance = score_distance(kth, scores[token.position]);
    if (std::ssize(rows) == params.cap || !std::isfinite(kth - scores[token.position])) {
      break;
    }
    const std::int32_t host_row = host_row_of(params.layer, params.step, row, token.position);
    if (params.layer.slot_of[host_row] == kNone) {  // new rows have slots since begin
      rows.push_back({.host_row = host_row, .distance = distance});
    }
  }
  return rows;
}

}  // namespace

void forecast_rows(ThreadPool& pool, const ForecastParams& params) {
  const std::int32_t query_rows = params.step.query_rows;
  const std::int32_t end = params.block.first + params.block.count;
  const std::int32_t first_entry = params.block.first / query_rows;
  const std::int32_t entries = (end - 1) / query_rows + 1 - first_entry;
  std::vector<std::vector<NearRow>> near(static_cast<std::size_t>(entries));
  pool.parallel_for(entries, [&](std::int64_t begin, std::int64_t stop) {
    for (std::int64_t i = begin; i < stop; ++i) {
      const std::int32_t last = (first_entry + static_cast<std::int32_t>(i) + 1) * query_rows;
      near[static_cast<std::size_t>(i)] = near_rows(params, std::min(last, end) - 1);
    }
  });
  std::vector<std::int32_t> rows;
  std::unordered_set<std::int32_t> seen;  // entries may share host rows
  float farthest = 0.0F;
  for (std::size_t place = 0; place < static_cast<std::size_t>(params.cap); ++place) {
    for (const std::vector<NearRow>& entry : near) {
      if (place < entry.size() && seen.insert(entry[place].host_row).second) {
        rows.push_back(entry[place].host_row);
        farthest = std::max(farthest, entry[place].distance);
      }
    }
  }
  CacheOps cache(params.layer);
  cache.begin(*params.step.tick + params.block.tick_offset);
  rows.resize(cache.forecast(rows, row_scores(params), farthest));
  fetch(pool, params.layer, rows);
  params.layer.counters->forecast += std::ssize(rows);
}

}  // namespace echo
