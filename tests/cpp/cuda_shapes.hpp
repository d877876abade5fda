#pragma once
// Sizes of the models that verbs are tried with on a GPU.

#include <cstdint>

#include "kernels/params.hpp"

namespace echo::cuda_test {

inline ShapeView shape_of(RowFormat rows, IndexKeyFormat keys = IndexKeyFormat::fp8, std::int32_t top_k = 16) {
  const bool small = rows == RowFormat::fp32 || rows == RowFormat::raw;
  return {.index_heads = 8,
          .index_dim = 48,
          .query_heads = 20,
          .latent_dim = small ? 48 : 512,
          .rope_dim = small ? 16 : 64,
          .top_k = top_k,
          .row_format = rows,
          .index_key_format = keys};
}

inline std::int32_t row_bytes_of(const ShapeView& shape) {
  const std::int32_t dim = shape.latent_dim + shape.rope_dim;
  switch (shape.row_format) {
    case RowFormat::fp8_656:
      return shape.latent_dim + shape.latent_dim / 128 * 4 + shape.rope_dim * 2;
    case RowFormat::bf16_1152:
      return 2 * dim;
    case RowFormat::fp32:
      return 4 * dim;
    case RowFormat::raw:
      return 528;  // a lane and a half more than four rounds of a warp
  }
  return 0;
}

}  // namespace echo::cuda_test
