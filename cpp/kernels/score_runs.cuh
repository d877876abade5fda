#pragma once
// Runs: what a thread block scores, group by group. All warps that need them make them for themselves.

#include "kernels/prediction.hpp"
#include "kernels/score_groups.cuh"

namespace echo {

inline constexpr float kSureMargin = 1.0F / kMargin;  ///< a deviation: see RunMaker::prefetch_margin

/// Key blocks of a group that are scored one after the other.
struct Run {
  std::int32_t queries;  ///< counts the groups of the thread block; where the queries are follows from that
  GroupRows rows;
  std::int32_t blocks;  ///< of the group
  std::int32_t first;   ///< of them
  std::int32_t count;
  std::int32_t new_first;  ///< of the thread block's rows whose new keys may be in its runs
  std::int32_t new_count;  ///< such rows of this run: the session's, up to the group's last

  /// Scores of a row of this length that are made.
  __device__ std::int32_t tokens_of(std::int32_t length) const {
    return min(length, (first + count) * kTokensPerBlock) - min(length, first * kTokensPerBlock);
  }
  /// Whether a block of the group is one of the run.
  __device__ bool has(std::int32_t block) const { return block >= first && block < first + count; }
  /// Whether a block may hold tokens that the pass appends, of this group's rows or those before them: one of each of
  /// the session's `query_rows` rows (at most 64), the last ones of the session.
  __device__ bool is_new(std::int32_t block, std::int32_t query_rows) const {
    return block >= blocks - (query_rows > 1 ? 2 : 1);
  }
};

/// Makes the runs of a thread block.
class RunMaker {
 public:
  __device__ RunMaker(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors)
      : walk_(p, groups, errors) {}

  /// Goes to the first run, then to the next one; false if there is none.
  __device__ bool begin() { return enter(walk_.begin()); }
  __device__ bool next() { return enter(walk_.next()); }

  __device__ const Run& run() const { return run_; }
  /// Thread blocks that have runs, and whether those behind them prefetch.
  __device__ std::int32_t scorers() const { return walk_.scorers(); }
  __device__ bool prefetches() const { return walk_.scorers() != static_cast<std::int32_t>(gridDim.x); }
  /// How far above the bound of prefetch a score has to be for its row to be asked for, in distances of that bound from
  /// the bound of candidates; NaN: none is. Where there is no time for all, it goes to rows that are almost certain.
  __device__ float prefetch_margin() const {
    return prefetches() ? (walk_.much_missing() ? kSureMargin : 0.0F) : float_of(kFloatNan);
  }
  /// Key blocks from the run's first on.
  __device__ std::int32_t left() const { return walk_.left(); }

 private:
  __device__ bool enter(bool there) {
    if (there) {
      run_ = {.queries = run_.queries + 1,
              .rows = walk_.rows(),
              .blocks = walk_.blocks(),
              .first = walk_.first(),
              .count = walk_.count(),
              .new_first = run_.new_first + run_.new_count,
              .new_count = 0};
      if (run_.is_new(run_.first + run_.count - 1, walk_.query_rows())) {
        run_.new_count = run_.rows.last - walk_.first_row(run_.rows.entry);
      }
    }
    return there;
  }

  GroupWalk walk_;
  Run run_{.queries = -1,
           .rows = {kNone, kNone, kNone},
           .blocks = 0,
           .first = 0,
           .count = 0,
           .new_first = 0,
           .new_count = 0};
};

}  // namespace echo
