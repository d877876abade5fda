// select: exact top-k of each row by radix on the ordered 32-bit key of a score
// (kernels/number_formats.hpp).
//
// Three passes over the scores count keys by 11, 11 and 10 of their bits, each among the keys that
// agree with the k-th largest so far; together they give that key, and how many are larger. A
// fourth pass takes, in order of position, all larger ones and the first of the equal ones, which
// is ties to the smaller position. Cost: O(length) per row, whatever the scores are; rows in
// parallel.
#include "reference/select.hpp"

#include <algorithm>
#include <array>
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

/// Requires 1 <= k <= length.
Cut find_cut(const float* scores, std::int32_t length, std::int32_t k) {
  std::uint32_t known = 0;  // upper bits of the key
  std::uint32_t mask = 0;
  std::int32_t wanted = k;
  int shift = 32;
  while (shift > 0) {
    const int bits = std::min(kDigitBits, shift);
    shift -= bits;
    const std::uint32_t digit_mask = (1U << bits) - 1U;
    Histogram histogram{};
    for (std::int32_t s = 0; s < length; ++s) {
      const std::uint32_t key = ordered_key(scores[s]);
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

void take(const float* scores, std::int32_t length, Cut cut, std::int32_t* selection) {
  for (std::int32_t s = 0; s < length; ++s) {
    const std::uint32_t key = ordered_key(scores[s]);
    if (key > cut.key) {
      *selection++ = s;
    } else if (key == cut.key && cut.equal > 0) {
      --cut.equal;
      *selection++ = s;
    }
  }
}

void select_row(const SelectParams& params, std::int32_t i) {
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
    return;
  }
  const Cut cut = find_cut(scores, length, found);
  take(scores, length, cut, selection);
  if (length >= k) {
    params.kth_score[row] = value_of_key(cut.key);
  }
}

}  // namespace

void select_rows(ThreadPool& pool, const SelectParams& params) {
  pool.parallel_for(params.block.count, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      select_row(params, static_cast<std::int32_t>(i));
    }
  });
}

}  // namespace echo
