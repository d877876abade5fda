#pragma once
// How far a resident row is from being selected, as the replacement rule wants it: looked up in the scores of the
// block that is being recalled. Shared by CPU and GPU code.
//
// A slot knows its host row only. Which session that belongs to, and at which position, follows from the owner of its
// block, a hint that is checked against the block table before it is believed. The query that speaks for the session
// is its last one in the block. Cost: two dependent loads per row; nothing is stored.

#include <cstdint>

#include "cache_manager/address.hpp"
#include "cache_manager/replacement.hpp"
#include "kernels/params.hpp"

namespace echo {

inline constexpr float kNotScored = -1.0F;  ///< a distance; such rows go by age

/// Where a row's score was found.
struct RowScore {
  std::int32_t query = kNone;  ///< row of the pass whose scores they are; kNone: there is none
  float score = 0.0F;
  bool known = false;  ///< the score is the row's
};

/// The scores of one block of rows; trivially copyable.
struct RowScores {
  const float* scores;  ///< [block.count, score_stride], or null: nothing is scored
  std::int64_t score_stride;
  const float* kth_score;  ///< [rows of the pass]
  StepView step;
  BlockView block;

  /// Candidate::distance of a host row (which must be one of the pool's).
  ECHO_HOST_DEVICE float distance(std::int32_t host_row) const { return distance(find(host_row)); }
  /// The k-th score that a host row is compared with minus its own: negative for rows above it. Returns whether the row
  /// is scored.
  ECHO_HOST_DEVICE bool below_kth(std::int32_t host_row, float& by) const { return below_kth(find(host_row), by); }

  /// In two steps: k-th scores are read in the second.
  ECHO_HOST_DEVICE RowScore find(std::int32_t host_row) const;
  ECHO_HOST_DEVICE bool below_kth(const RowScore& row, float& by) const;
  ECHO_HOST_DEVICE float distance(const RowScore& row) const {
    float by = 0.0F;
    return below_kth(row, by) ? score_distance(by) : kNotScored;
  }
};

ECHO_HOST_DEVICE RowScores row_scores(const RecallParams& params) {
  return {params.kth_score == nullptr ? nullptr : params.scores, params.score_stride, params.kth_score, params.step,
          params.block};
}

ECHO_HOST_DEVICE RowScores row_scores(const ForecastParams& params) {
  return {params.scores, params.score_stride, params.kth_score, params.step, params.block};
}

ECHO_HOST_DEVICE RowScore RowScores::find(std::int32_t host_row) const {
  if (scores == nullptr) {
    return {};
  }
  const std::int32_t host_block = host_row / kTokensPerBlock;
  const BlockOwner owner = step.owners[host_block];
  if (owner.entry < 0 || owner.entry >= step.rows / step.query_rows || owner.index < 0 ||
      owner.index >= step.table_stride) {
    return {};
  }
  const std::int32_t end_of_entry = (owner.entry + 1) * step.query_rows;
  const std::int32_t end_of_block = block.first + block.count;
  const std::int32_t query = (end_of_entry < end_of_block ? end_of_entry : end_of_block) - 1;
  const std::int32_t position = owner.index * kTokensPerBlock + host_row % kTokensPerBlock;
  if (query < block.first || query / step.query_rows != owner.entry || position >= score_stride) {
    return {};
  }
  // All that is left is read before any of it is looked at: on a GPU that takes as long as one of these accesses.
  const std::int32_t owned = step.block_table[static_cast<std::int64_t>(owner.entry) * step.table_stride + owner.index];
  const std::int32_t last = step.positions[query];
  const float score = scores[static_cast<std::int64_t>(query - block.first) * score_stride + position];
  // Padding rows have position kNone, which no position is within.
  return {query, score, owned == host_block && position <= last};
}

ECHO_HOST_DEVICE bool RowScores::below_kth(const RowScore& row, float& by) const {
  if (row.query == kNone) {
    return false;
  }
  const float kth = kth_score[row.query];
  by = kth - row.score;
  return row.known & (kth == kth);
}

}  // namespace echo
