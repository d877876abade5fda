// The two matrix products of attention over a tile of decoded rows, [heads x row_dim] x [row_dim x
// rows] and [heads x rows] x [rows x latent_dim].
//
// The elements of a row lie in the lanes. Some heads share each load of a row; their accumulators
// stay in registers. A logit is summed in 16 partial sums (element i in sum i % 16), which are then
// added pairwise; an output element is one chain over the rows. So the order of additions depends
// neither on the vector width nor on which heads share a pass. Cost: heads x rows x (row_dim +
// latent_dim) multiply-adds.
#include "reference/simd/attend_loops.hpp"

#include "reference/simd/vector.hpp"

namespace echo::ECHO_SIMD_NAMESPACE {
namespace {

constexpr int kLanes = 16;
constexpr int kPieces = kLanes / kVectorFloats;
constexpr int kHeads = kPieces > 2 ? 2 : 4;  ///< heads at once; what is left over goes one by one

/// Adds up 16 partial sums, pairwise.
inline float total(const Vector (&sums)[kPieces]) {
  float lanes[kLanes];
  for (int i = 0; i < kPieces; ++i) {
    store(lanes + i * kVectorFloats, sums[i]);
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] += lanes[i + half];
    }
  }
  return lanes[0];
}

template <int kCount>
inline void dot_heads(const AttendTile& tile, const float* queries, float* logits) {
  for (int t = 0; t < tile.count; ++t) {
    const float* row = tile.rows + t * tile.row_dim;
    Vector sums[kCount][kPieces] = {};
    for (int d = 0; d < tile.row_dim; d += kLanes) {
      for (int i = 0; i < kPieces; ++i) {
        const int at = d + i * kVectorFloats;
        const Vector value = load(row + at);
        for (int h = 0; h < kCount; ++h) {
          sums[h][i] += load(queries + h * tile.row_dim + at) * value;
        }
      }
    }
    for (int h = 0; h < kCount; ++h) {
      logits[h * tile.stride + t] = total(sums[h]);
    }
  }
}

template <int kCount>
inline void add_heads(const AttendTile& tile, const float* weights, float* out) {
  for (int d = 0; d < tile.latent_dim; d += kLanes) {
    Vector sums[kCount][kPieces];
    for (int h = 0; h < kCount; ++h) {
      for (int i = 0; i < kPieces; ++i) {
        sums[h][i] = load(out + h * tile.latent_dim + d + i * kVectorFloats);
      }
    }
    for (int t = 0; t < tile.count; ++t) {
      for (int i = 0; i < kPieces; ++i) {
        const Vector value = load(tile.rows + t * tile.row_dim + d + i * kVectorFloats);
        for (int h = 0; h < kCount; ++h) {
          sums[h][i] += value * weights[h * tile.stride + t];
        }
      }
    }
    for (int h = 0; h < kCount; ++h) {
      for (int i = 0; i < kPieces; ++i) {
        store(out + h * tile.latent_dim + d + i * kVectorFloats, sums[h][i]);
      }
    }
  }
}

void dot_rows(const AttendTile& tile, const float* queries, float* logits) {
  int h = 0;
  for (; h + kHeads <= tile.heads; h += kHeads) {
    dot_heads<kHeads>(tile, queries + h * tile.row_dim, logits + h * tile.stride);
  }
  for (; h < tile.heads; ++h) {
    dot_heads<1>(tile, queries + h * tile.row_dim, logits + h * tile.stride);
  }
}

void add_rows(const AttendTile& tile, const float* weights, float* out) {
  int h = 0;
  for (; h + kHeads <= tile.heads; h += kHeads) {
    add_heads<kHeads>(tile, weights + h * tile.stride, out + h * tile.latent_dim);
  }
  for (; h < tile.heads; ++h) {
    add_heads<1>(tile, weights + h * tile.stride, out + h * tile.latent_dim);
  }
}

}  // namespace

const AttendLoops attend_loops{.dot_rows = dot_rows, .add_rows = add_rows};

}  // namespace echo::ECHO_SIMD_NAMESPACE
