#pragma once
// Decode steps of random sessions: which of them take part, and how far they have come.

#include <cstdint>
#include <random>
#include <vector>

#include "cuda_pair.hpp"

namespace echo::cuda_test {

/// Positions of the next step's rows, and of its end. One session in eight sits it out, as padding; one that is full
/// starts again. Before the step after, up to `most_more` tokens come to a session besides.
inline std::vector<std::int32_t> next_positions(const Sizes& sizes, std::vector<std::int32_t>& lengths,
                                                std::mt19937& engine, unsigned most_more = 0) {
  std::vector<std::int32_t> positions;
  for (std::int32_t& length : lengths) {
    length = length + sizes.query_rows > sizes.score_stride() ? 1 : length;
    const bool padding = engine() % 8 == 0;
    for (std::int32_t i = 0; i < sizes.query_rows; ++i) {
      positions.push_back(padding ? kNone : length + i);
    }
    if (!padding) {
      length += sizes.query_rows;
      length += most_more == 0 ? 0 : static_cast<std::int32_t>(engine() % (most_more + 1));
    }
  }
  return positions;
}

}  // namespace echo::cuda_test
