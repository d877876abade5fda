#pragma once
// The number formats of rows, index keys and scores, to the bit. This is the definition: whatever
// hardware conversion a kernel uses has to give the same bits as these functions.
//   bf16   round to nearest even, NaN stays NaN
//   e4m3   "fn" variant (no infinities, NaN = 0x7f), round to nearest even, saturating to +-448
//   scale  the smallest power of two that brings a group of values into e4m3's range, so that scaling is exact
//   order  floats as unsigned integers, NaN below -inf, -0.0 equal to +0.0
// All of it works on bits: no libm, no dependence on rounding or flush-to-zero modes.

#include <cstdint>
#include <cstring>

#include "cache_manager/address.hpp"

namespace echo {

inline constexpr float kE4m3Max = 448.0F;
inline constexpr std::uint32_t kFloatInf = 0x7F800000U;
inline constexpr std::uint32_t kFloatNan = 0x7FC00000U;
inline constexpr std::uint32_t kFloatSign = 0x80000000U;

ECHO_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ECHO_HOST_DEVICE float float_of(std::uint32_t bits) {
  float value = 0.0F;
  memcpy(&value, &bits, sizeof value);
  return value;
}

ECHO_HOST_DEVICE std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & ~kFloatSign) > kFloatInf) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // quiet, so that no payload rounds to inf
  }
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

ECHO_HOST_DEVICE float from_bf16(std::uint16_t value) { return float_of(static_cast<std::uint32_t>(value) << 16); }

ECHO_HOST_DEVICE std::uint8_t to_e4m3(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & ~kFloatSign;
  std::uint32_t code = 0;
  if (magnitude > kFloatInf) {
    code = 0x7FU;
  } else if (magnitude >= 0x43E00000U) {  // 448
    code = 0x7EU;
  } else if (magnitude >= 0x3C800000U) {  // 2^-6, the smallest normal: 3 of 23 mantissa bits stay
    const std::uint32_t rounded = magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U);
    code = (rounded >> 20) - (120U << 3);  // exponent bias 127 -> 7
  } else if (magnitude >= 0x3A800000U) {   // 2^-10, half of the smallest subnormal: a multiple of 2^-9
    const std::uint32_t shift = 141U - (magnitude >> 23);
    const std::uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
    code = (mantissa + (1U << (shift - 1U)) - 1U + ((mantissa >> shift) & 1U)) >> shift;
  }
  return static_cast<std::uint8_t>(sign | code);
}

ECHO_HOST_DEVICE float from_e4m3(std::uint8_t value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x80U) << 24;
  const std::uint32_t code = value & 0x7FU;
  if (code == 0x7FU) {
    return float_of(sign | kFloatNan);
  }
  if (code < 8U) {
    return float_of(sign | bits_of(static_cast<float>(code) * 0.001953125F));  // 2^-9
  }
  return float_of(sign | ((code << 20) + (120U << 23)));
}

/// Larger of `amax` (not negative) and |value|; NaN values do not count.
ECHO_HOST_DEVICE float amax_with(float amax, float value) {
  const std::uint32_t magnitude = bits_of(value) & ~kFloatSign;
  return magnitude <= kFloatInf && magnitude > bits_of(amax) ? float_of(magnitude) : amax;
}

/// Smallest 2^e with amax <= 448 * 2^e, e in [-126, 127]; 1 for amax = 0. For amax = inf it is
/// 2^120, the first at which 448 * 2^e is inf too.
ECHO_HOST_DEVICE float power_of_two_scale(float amax) {
  const std::uint32_t bits = bits_of(amax);
  if (bits == 0U) {
    return 1.0F;
  }
  // amax = m * 2^x and 448 = 1.75 * 2^8, so e = x - 8 if m <= 1.75, else x - 7.
  const std::uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFFU) > 0x600000U ? 1U : 0U);
  return float_of((exponent < 9U ? 1U : exponent - 8U) << 23);
}

/// Increases with the value; 0 for NaN, which is less than what -inf gives.
ECHO_HOST_DEVICE std::uint32_t ordered_key(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & ~kFloatSign) > kFloatInf) {
    return 0U;
  }
  if (bits == kFloatSign) {
    return kFloatSign;  // -0.0 as +0.0
  }
  return (bits & kFloatSign) != 0U ? ~bits : bits | kFloatSign;
}

/// The value of an ordered key.
ECHO_HOST_DEVICE float value_of_key(std::uint32_t key) {
  if (key == 0U) {
    return float_of(kFloatNan);
  }
  return float_of((key & kFloatSign) != 0U ? key & ~kFloatSign : ~key);
}

}  // namespace echo
