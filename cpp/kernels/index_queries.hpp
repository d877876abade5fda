#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

inline constexpr std::int32_t kIndexHeadChunk = 32;  ///< heads that score works on at once

/// The queries of a row block as they enter the dot products, heads filled up with zeros to whole
/// chunks.
struct IndexQueryView {
  float* values;   ///< [block_rows, heads / chunk, index_dim, chunk]
  float* weights;  ///< [block_rows, heads], with the queries' scales
  std::int32_t heads;
};

/// Heads filled up to whole chunks.
inline std::int32_t padded_index_heads(const ShapeView& shape) {
  return (shape.index_heads + kIndexHeadChunk - 1) / kIndexHeadChunk * kIndexHeadChunk;
}

/// First launch of score.
void launch_index_queries(const ScoreParams& params, const IndexQueryView& queries, const LaunchContext& context);

}  // namespace echo
