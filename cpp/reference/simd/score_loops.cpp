// Index scores as a small matrix product, (rows x heads) x dim x 64 tokens, with the tokens in the
// lanes.
//
// Keys are transposed once into a tile of floats (32 KiB at dim 128), in panels of 32 tokens so
// that the loop over dim reads a panel (16 KiB) from the first-level cache front to back, for all
// rows. The accumulators of kHeads heads x 32 tokens stay in registers; each step of the loop loads
// one line of the panel and one number per head. Lanes never meet: each score is one chain of
// additions over dim, then one over heads, whatever else is in the tile, and of any vector width.
// Cost: rows x heads x dim x 64 multiply-adds, 8 (AVX2) or 16 (AVX-512) a cycle.
#include "reference/simd/score_loops.hpp"

#include "reference/simd/vector.hpp"

namespace echo::ECHO_SIMD_NAMESPACE {
namespace {

constexpr int kPieces = kPanel / kVectorFloats;        ///< vectors of one line of a panel
constexpr int kHeads = kPieces > 4 ? 1 : 8 / kPieces;  ///< 8 vectors of accumulators: 4 heads, 2, 1

template <typename Key, typename Decode>
void fill_tile(const Key* keys, int dim, float* tile, Decode decode) {
  for (int first = 0; first < kTileTokens; first += kPanel) {
    for (int d = 0; d < dim; ++d) {
      for (int t = 0; t < kPanel; ++t) {
        *tile++ = decode(keys[(first + t) * dim + d]);
      }
    }
  }
}

void decode_tile(const std::uint8_t* codes, const float* values, int dim, float* tile) {
  fill_tile(codes, dim, tile, [values](std::uint8_t code) { return values[code]; });
}

void transpose_tile(const float* keys, int dim, float* tile) {
  fill_tile(keys, dim, tile, [](float key) { return key; });
}

/// sums += sum over kHeads heads of weight * relu(query . key).
inline void add_heads(const float* queries, const float* weights, const float* panel, int dim,
                      Vector (&sums)[kPieces]) {
  Vector dots[kHeads][kPieces] = {};
  for (int d = 0; d < dim; ++d) {
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kPieces; ++i) {
        dots[h][i] += load(panel + d * kPanel + i * kVectorFloats) * queries[h * dim + d];
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kPieces; ++i) {
      const Vector relu = dots[h][i] < 0.0F ? Vector{} : dots[h][i];  // NaN stays
      sums[i] += relu * weights[h];
    }
  }
}

void score_tile(const ScoreRows& rows, const float* tile, const float* scales, float* scores) {
  for (int first = 0; first < kTileTokens; first += kPanel) {
    const float* panel = tile + first * rows.dim;
    for (std::int64_t r = 0; r < rows.rows; ++r) {
      Vector sums[kPieces] = {};
      for (int h = 0; h < rows.heads; h += kHeads) {
        add_heads(rows.queries + (r * rows.heads + h) * rows.dim, rows.weights + r * rows.heads + h, panel, rows.dim,
                  sums);
      }
      for (int i = 0; i < kPieces; ++i) {
        const int at = first + i * kVectorFloats;
        store(scores + r * kTileTokens + at, sums[i] * load(scales + at));
      }
    }
  }
}

}  // namespace

const ScoreLoops score_loops{.decode_tile = decode_tile, .transpose_tile = transpose_tile, .score_tile = score_tile};

}  // namespace echo::ECHO_SIMD_NAMESPACE
