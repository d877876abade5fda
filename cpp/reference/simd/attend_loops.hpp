#pragma once

namespace echo {

/// Sizes of a tile of decoded KV rows and of the heads that attend to it.
struct AttendTile {
  const float* rows;  ///< [count, row_dim]
  int count;
  int heads;
  int row_dim;     ///< a multiple of 16
  int latent_dim;  ///< a multiple of 16
  int stride;      ///< floats between the logits, or weights, of two heads
};

/// The inner loops of attend, compiled for one instruction set. All sums have the same order on
/// every CPU.
struct AttendLoops {
  /// logits[h, t] = queries[h] . rows[t], queries [heads, row_dim].
  void (*dot_rows)(const AttendTile& tile, const float* queries, float* logits);
  /// out[h, :] += sum_t weights[h, t] * rows[t, :latent_dim], out [heads, latent_dim].
  void (*add_rows)(const AttendTile& tile, const float* weights, float* out);
};

namespace simd_base {
extern const AttendLoops attend_loops;
}
namespace simd_avx2 {
extern const AttendLoops attend_loops;
}
namespace simd_avx512 {
extern const AttendLoops attend_loops;
}

}  // namespace echo
