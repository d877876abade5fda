#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "echo/array.hpp"
#include "kernels/number_formats.hpp"

namespace echo {

/// Element of an f32 or bf16 array.
__device__ inline float load_float(const void* array, DType dtype, std::int64_t index) {
  return dtype == DType::f32 ? static_cast<const float*>(array)[index]
                             : from_bf16(static_cast<const std::uint16_t*>(array)[index]);
}

/// An element's bits as they are loaded, for those who have something to do until they are there; then the number.
__device__ inline std::uint32_t load_bits(const void* array, DType dtype, std::int64_t index) {
  return dtype == DType::f32 ? static_cast<const std::uint32_t*>(array)[index]
                             : static_cast<const std::uint16_t*>(array)[index];
}
__device__ inline float float_of_bits(std::uint32_t bits, DType dtype) {
  return dtype == DType::f32 ? float_of(bits) : from_bf16(static_cast<std::uint16_t>(bits));
}

__device__ inline void store_float(void* array, DType dtype, std::int64_t index, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(array)[index] = value;
  } else {
    static_cast<std::uint16_t*>(array)[index] = to_bf16(value);
  }
}

/// value / scale for a scale of power_of_two_scale, whose inverse is a float, too; a division takes as long as all else
/// that is done to an element. A NaN stays as it is, where a product would drop its sign.
__device__ inline float scaled_down(float value, float scale) {
  constexpr std::uint32_t kTwiceOne = 2U * 0x3F800000U;
  return (bits_of(value) & ~kFloatSign) > kFloatInf ? value : value * float_of(kTwiceOne - bits_of(scale));
}

/// Two bf16 as they lie in memory, the first in the lower half.
__device__ inline std::uint32_t pack_bf16(float first, float second) {
  return static_cast<std::uint32_t>(to_bf16(first)) | static_cast<std::uint32_t>(to_bf16(second)) << 16;
}

/// Two e4m3 likewise, but for the sign of a NaN.
__device__ inline std::uint32_t e4m3_pair(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

/// Four e4m3 likewise. Bit for bit as number_formats.hpp has it: the conversion instruction, which drops the sign of a
/// NaN, and that sign.
__device__ inline std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  const auto sign_of_nan = [](float value) { return value != value ? bits_of(value) >> 24 & 0x80U : 0U; };
  return e4m3_pair(a, b) | e4m3_pair(c, d) << 16 | sign_of_nan(a) | sign_of_nan(b) << 8 | sign_of_nan(c) << 16 |
         sign_of_nan(d) << 24;
}

}  // namespace echo
