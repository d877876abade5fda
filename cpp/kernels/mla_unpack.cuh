#pragma once
// Stored e4m3 codes as bf16, exactly, without the conversion unit: a code's seven bits are moved to where a bf16 has
// the low four bits of its exponent and the high three of its mantissa. That is the value times 2^-120, subnormals
// included, so one multiplication by 2^120 x scale, a power of two, gives value x scale. Per pair of codes: a byte
// permute, a shift, a mask and a multiplication; a quarter of that again to look for NaN, where there may be any
// (nan_codes.cuh). The shift is a multiplication, too, by another unit than that of the permute and the mask: attention
// takes 1 % less. What this gets wrong - NaN codes, scales from 2^8 on or with more bits than a bf16 has - is noticed
// and left to convert(), the definition.

#include <cstdint>

#include "kernels/elements.cuh"
#include "kernels/number_formats.hpp"
#include "kernels/ptx/copy.cuh"

namespace echo::mla {

/// 2^120 x scale as two equal bf16; 0 for a scale of 0.
__device__ __forceinline__ std::uint32_t unpack_factor(std::uint32_t scale) {
  const std::uint32_t bits = scale == 0U ? 0U : (scale >> 16) + (120U << 7);
  return __byte_perm(bits, 0, 0x1010);
}
/// Whether that is right: the scale has no more bits than a bf16 and lies in [2^-126, 2^8), or is 0.
__device__ __forceinline__ bool is_usual_scale(std::uint32_t scale) {
  constexpr std::uint32_t kLeast = 1U << 7;
  constexpr std::uint32_t kEnd = 135U << 7;
  const std::uint32_t swapped = __byte_perm(scale, 0, 0x1032);  // bits that a bf16 does not have make it large
  return (swapped == 0U) | (swapped - kLeast < kEnd - kLeast);
}

/// How eight of 16 codes are taken out of their four words: each with its sign extended to 16 bits.
struct Order {
  std::uint32_t even;  ///< codes 0 and 1 of a word
  std::uint32_t odd;   ///< codes 2 and 3

  /// Of codes 0 to 7, or 8 to 15.
  __device__ __forceinline__ explicit Order(bool last)
      : even(last ? 0xD5C4U : 0x9180U), odd(last ? 0xF7E6U : 0xB3A2U) {}
};

/// Two codes of either word, times the factor.
__device__ __forceinline__ std::uint32_t unpack_pair(std::uint32_t first, std::uint32_t last, std::uint32_t selector,
                                                     std::uint32_t factor) {
  // Shifted, a code's sign is in all of bits 11 to 15, of which 15 stays.
  return ptx::multiply_bf16x2(ptx::permuted(first, last, selector) * ptx::unknown(16) & 0x87F087F0U, factor);
}
/// Eight codes as bf16.
__device__ __forceinline__ uint4 unpack(const uint4& codes, const Order& order, std::uint32_t factor) {
  return make_uint4(unpack_pair(codes.x, codes.z, order.even, factor), unpack_pair(codes.x, codes.z, order.odd, factor),
                    unpack_pair(codes.y, codes.w, order.even, factor),
                    unpack_pair(codes.y, codes.w, order.odd, factor));
}

/// Two codes, by the definition.
__device__ inline std::uint32_t convert(std::uint32_t codes, float scale) {
  return pack_bf16(from_e4m3(static_cast<std::uint8_t>(codes & 0xFFU)) * scale,
                   from_e4m3(static_cast<std::uint8_t>(codes >> 8 & 0xFFU)) * scale);
}

}  // namespace echo::mla
