#pragma once
// A layer whose scores a test makes up, sifted by the CPU.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "kernels/prediction.hpp"
#include "reference/select.hpp"
#include "reference/sift.hpp"
#include "reference_cache.hpp"

namespace echo::reference_test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kQuietNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kAll = 1.0F;  ///< rows per token: no cap

inline RowSift row_sift(std::int32_t compared, std::int32_t found, std::uint32_t bound) {
  return {.found = found, .compared = compared, .candidates = bound, .prefetch = bound};
}

/// A layer of raw rows, one session per batch entry, and scores as a test likes them.
class Sifted {
 public:
  Sifted(const WorldSizes& sizes, std::vector<std::int32_t> positions, std::int32_t capacity = 256)
      : cache(sizes),
        scores(positions.size() * stride(), kQuietNan),
        thresholds(positions.size() * 3, kQuietNan),
        deviations(positions.size() * 3, kQuietNan),
        rows(positions.size() * 2),
        tokens(positions.size() * static_cast<std::size_t>(capacity)),
        capacity_(capacity) {
    world().positions = std::move(positions);
    for (std::size_t i = 0; i < world().session.size(); ++i) {
      world().session[i] = world().positions[i] == kNone ? kNone : static_cast<std::int32_t>(i) / sizes.query_rows;
    }
    for (std::int32_t row = 0; row < sizes.host_blocks * 64; ++row) {
      std::ranges::copy(row_pattern(row, 0, world().host_bytes(row).size()), world().host_bytes(row).begin());
    }
    cache.begin();
  }

  World& world() { return cache.world; }
  std::size_t stride() const { return static_cast<std::size_t>(cache.world.sizes.table_stride) * 64; }
  std::span<float> row(std::size_t i) {
    return std::span(scores).subspan(i * stride(), static_cast<std::size_t>(world().positions[i] + 1));
  }
  /// Sets what is predicted for a session so that there are these bounds, but for rounding.
  void bound(std::size_t session, float candidates, float prefetch) {
    thresholds[session * 3 + 1] = prefetch;
    deviations[session * 3 + 1] = (prefetch - candidates) / kMargin;
  }
  void bound(std::size_t session, float both) { bound(session, both, both); }
  std::span<RowSift> sifts() { return std::span(rows).first(world().positions.size()); }
  /// Host row of a position of the first session.
  std::int32_t host_row(std::int32_t position) const { return cache.world.host_row_at(0, position); }
  std::int32_t slot(std::int32_t position) const {
    return cache.world.slot_of[static_cast<std::size_t>(host_row(position))];
  }

  void sift(float cap = 0.0F) {
    prefetched = {0, 7};
    std::ranges::fill(rows, RowSift{});
    std::fill(rows.begin() + std::ssize(world().positions), rows.end(), row_sift(0, 9, 0));
    sift_rows(pool_, {.layer = world().layer(),
                      .step = world().step(),
                      .block = world().all_rows(),
                      .shape = world().shape,
                      .index_q = nullptr,
                      .index_q_dtype = DType::f32,
                      .index_weights = nullptr,
                      .scores = scores.data(),
                      .score_stride = static_cast<std::int64_t>(stride()),
                      .sift = view(cap)});
    cache.check();
  }

  struct Selected {
    std::vector<std::int32_t> selection;
    std::vector<float> kth;
  };
  Selected select(bool from_lists) {
    Selected out{.selection = std::vector<std::int32_t>(world().positions.size() * kTopK, 1 << 30),
                 .kth = std::vector<float>(world().positions.size(), -777.0F)};
    select_rows(pool_, {.step = world().step(),
                        .block = world().all_rows(),
                        .shape = world().shape,
                        .scores = scores.data(),
                        .score_stride = static_cast<std::int64_t>(stride()),
                        .selection = out.selection.data(),
                        .kth_score = out.kth.data(),
                        .sift = from_lists ? view(0.0F) : SiftView{},
                        .counters = &world().counters});
    return out;
  }

  Cache cache;
  std::vector<float> scores;
  std::vector<float> thresholds;
  std::vector<float> deviations;
  std::vector<RowSift> rows;
  std::vector<ScoredToken> tokens;
  std::vector<std::int32_t> prefetched = {0, 0};

 private:
  SiftView view(float cap) {
    return {.rows = rows.data(),
            .next_rows = rows.data() + world().positions.size(),
            .tokens = tokens.data(),
            .capacity = capacity_,
            .thresholds = thresholds.data() + 1,
            .deviations = deviations.data() + 1,
            .predicted_stride = 3,
            .prefetched = &prefetched[0],
            .next_prefetched = &prefetched[1],
            .prefetch_cap = cap};
  }

  std::int32_t capacity_;
  ThreadPool pool_{2};
};

/// Scores 0, 1, 2 ... of positions that a stride through them puts in no order.
inline void fill_distinct(std::span<float> row, float first = 1.0F) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = first + static_cast<float>(i * 37 % row.size()) / static_cast<float>(row.size());
  }
}

}  // namespace echo::reference_test
