#pragma once

#include <cstdint>

namespace echo {

/// Tokens of a key tile, and how many of them lie side by side: a tile is [kTileTokens /
/// kPanel][dim][kPanel] floats.
inline constexpr int kTileTokens = 64;
inline constexpr int kPanel = 32;

/// Query rows that are scored against one tile.
struct ScoreRows {
  const float* queries;  ///< [rows, heads, dim]
  const float* weights;  ///< [rows, heads]
  int rows;
  int heads;  ///< a multiple of 4
  int dim;
};

/// The inner loops of score, compiled for one instruction set.
struct ScoreLoops {
  /// tile[p][d][t] = values[codes[p * kPanel + t, d]] for 64 codes of `dim` bytes.
  void (*decode_tile)(const std::uint8_t* codes, const float* values, int dim, float* tile);
  /// tile[p][d][t] = keys[p * kPanel + t, d] for 64 keys of `dim` floats.
  void (*transpose_tile)(const float* keys, int dim, float* tile);
  /// scores[r, t] = scales[t] * sum_h weights[r, h] * relu(queries[r, h] . key t), [rows,
  /// kTileTokens].
  void (*score_tile)(const ScoreRows& rows, const float* tile, const float* scales, float* scores);
};

namespace simd_base {
extern const ScoreLoops score_loops;
}
namespace simd_avx2 {
extern const ScoreLoops score_loops;
}
namespace simd_avx512 {
extern const ScoreLoops score_loops;
}

}  // namespace echo
