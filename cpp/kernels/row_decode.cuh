#pragma once
// Stored KV rows as floats, four elements at a time: a raw load, so that many can be in flight, and
// its decoding.

#include <cstddef>
#include <cstdint>

#include "echo/model_shape.hpp"
#include "kernels/e4m3_decode.cuh"
#include "kernels/number_formats.hpp"
#include "kernels/params.hpp"

namespace echo {

template <RowFormat kFormat>
struct RowPiece;

template <>
struct RowPiece<RowFormat::fp32> {
  float4 values;

  __device__ void load(const std::byte* row, std::int32_t first, const ShapeView&) {
    values = *reinterpret_cast<const float4*>(row + static_cast<std::ptrdiff_t>(first) * 4);
  }
  __device__ float4 decode() const { return values; }
};

__device__ inline float4 unpack_bf16(uint2 words) {
  return make_float4(float_of(words.x << 16), float_of(words.x & 0xFFFF0000U), float_of(words.y << 16),
                     float_of(words.y & 0xFFFF0000U));
}

template <>
struct RowPiece<RowFormat::bf16_1152> {
  uint2 words;

  __device__ void load(const std::byte* row, std::int32_t first, const ShapeView&) {
    words = *reinterpret_cast<const uint2*>(row + static_cast<std::ptrdiff_t>(first) * 2);
  }
  __device__ float4 decode() const { return unpack_bf16(words); }
};

template <>
struct RowPiece<RowFormat::fp8_656> {
  uint2 words;  ///< codes and scale bits of the latent part, bf16 of the rope part
  bool latent;

  __device__ void load(const std::byte* row, std::int32_t first, const ShapeView& shape) {
    constexpr std::int32_t kGroup = kFp8Group;
    latent = first < shape.latent_dim;
    const std::byte* scales = row + shape.latent_dim;
    if (latent) {
      words.x = *reinterpret_cast<const std::uint32_t*>(row + first);
      words.y = *reinterpret_cast<const std::uint32_t*>(scales + first / kGroup * 4);
    } else {
      words = *reinterpret_cast<const uint2*>(scales + shape.latent_dim / kGroup * 4 + (first - shape.latent_dim) * 2);
    }
  }
  __device__ float4 decode() const {
    if (!latent) {
      return unpack_bf16(words);
    }
    const float4 codes = unpack_e4m3(words.x);
    const float scale = float_of(words.y);
    return make_float4(codes.x * scale, codes.y * scale, codes.z * scale, codes.w * scale);
  }
};

}  // namespace echo
