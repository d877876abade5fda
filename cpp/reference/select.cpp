// select: exact top-k of each row by radix on the ordered 32-bit key of a score
// (kernels/number_formats.hpp).
//
// Three passes over the scores count keys by 11, 11 and 10 of their bits, each among the keys that
// agree with the k-th largest so far; together they give that key, and how many are larger. A
// fourth pass takes, in order of position, all larger ones and the first of the equal ones, which
// is ties to the smaller position. Cost: O(length) per row, whatever the scores are; rows in
// parallel. Where score listed all tokens above some bound, and at least k of them, the k best are
// among those: then the same is done with the list, brought into the order of positions.
#include "reference/select.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"
#include "reference/step_rows.hpp"

namespace echo {
namespace {

constexpr int kDigitBits = 11;
using Histogram = std::array<std::int32_t, 1U << kDigitBits>;

struct Cut {
  std::uint32_t key;   ///< of the k-th largest score
  std::int32_t equal;  ///< how many scores of just that key belong to the k largest
};

/// Keys and positions of all tokens of a row, in order of position.
struct AllScores {
  const float* scores;
  std::int32_t length;
  std::uint32_t key(std::int32_t i) const { return ordered_key(scores[i]); }
  static std::int32_t position(std::int32_t i) { return i; }
};

/// The same of its candidates.
struct Candidates {
  std::vector<ScoredToken> tokens;
  std::int32_t length;
  std::uint32_t key(std::int32_t i) const { return tokens[static_cast<std::size_t>(i)].key; }
  std::int32_t position(std::int32_t i) const { return tokens[static_cast<std::size_t>(i)].position; }
};

/// Requires 1 <= k <= length.
template <typename Tokens>
Cut find_cut(const Tokens& tokens, std::int32_t k) {
  std::uint32_t known = 0;  // upper bits of the key
  std::uint32_t mask = 0;
  std::int32_t wanted = k;
  int shift = 32;
  while (shift > 0) {
    const int bits = std::min(kDigitBits, shift);
    shift -= bits;
    const std::uint32_t digit_mask = (1U << bits) - 1U;
    Histogram histogram{};
    for (std::int32_t i = 0; i < tokens.length; ++i) {
      const std::uint32_t key = tokens.key(i);
      histogram[(key >> shift) & digit_mask] += (key & mask) == known ? 1 : 0;
    }
    std::uint32_t digit = digit_mask;
    for (; histogram[digit] < wanted; --digit) {
      wanted -= histogram[digit];
    }
    known |= digit << shift;
    mask |= digit_mask << shift;
  }
  return {.key = known, .equal = wanted};
}

/// Writes out the k best; returns the k-th score.
template <typename Tokens>
float take(const Tokens& tokens, std::int32_t k, std::int32_t* selection) {
  Cut cut = find_cut(tokens, k);
  for (std::int32_t i = 0; i < tokens.length; ++i) {
    const std::uint32_t key = tokens.key(i);
    if (key > cut.key) {
      *selection++ = tokens.position(i);
    } else if (key == cut.key && cut.equal > 0) {
      --cut.equal;
      *selection++ = tokens.position(i);
    }
  }
  return value_of_key(cut.key);
}

/// Whether the k best of a row of `length` tokens are among its candidates.
bool candidates_do(const SelectParams& params, std::int32_t i, std::int32_t length) {
  const RowSift& sift = params.sift.rows[i];
  return sift.candidates != 0 && sift.compared == length && sift.found >= params.shape.top_k &&
         sift.found <= params.sift.capacity;
}

Candidates candidates_of(const SelectParams& params, std::int32_t i) {
  const std::int32_t found = params.sift.rows[i].found;
  const ScoredToken* first = params.sift.tokens + static_cast<std::int64_t>(i) * params.sift.capacity;
  Candidates candidates{.tokens = std::vector<ScoredToken>(first, first + found), .length = found};
  std::ranges::sort(candidates.tokens, {}, &ScoredToken::position);
  return candidates;
}

/// Whether all scores had to be searched although there was a list.
bool select_row(const SelectParams& params, std::int32_t i) {
  const std::int32_t row = params.block.first + i;
  const std::int32_t k = params.shape.top_k;
  const float* scores = params.scores + i * params.score_stride;
  std::int32_t* selection = params.selection + static_cast<std::int64_t>(row) * k;
  const std::int32_t length = position_of(params.step, row) + 1;
  if (length > params.score_stride) {
    throw StateError("positions: row " + std::to_string(row) + " has " + std::to_string(length) +
                     " tokens, there are " + std::to_string(params.score_stride) + " scores");
  }
  const std::int32_t found = std::min(length, k);
  std::fill(selection + found, selection + k, kNone);
  if (found == 0) {
    return false;
  }
  const bool listed = length > k && params.sift.rows != nullptr;
  const bool from_list = listed && candidates_do(params, i, length);
  const float kth = from_list ? take(candidates_of(params, i), k, selection)
                              : take(AllScores{.scores = scores, .length = length}, found, selection);
  if (length >= k) {
    params.kth_score[row] = kth;
  }
  return listed && !from_list;
}

}  // namespace

void select_rows(ThreadPool& pool, const SelectParams& params) {
  std::atomic<std::int64_t> full = 0;
  pool.parallel_for(params.block.count, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      full += select_row(params, static_cast<std::int32_t>(i)) ? 1 : 0;
    }
  });
  if (params.counters != nullptr) {
    params.counters->full_selects += full;
  }
}

}  // namespace echo
