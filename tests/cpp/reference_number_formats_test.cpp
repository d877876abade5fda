// Number formats against slow definitions in double that share no code with them.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <span>

#include "kernels/number_formats.hpp"
#include "reference/e4m3_codec.hpp"

namespace echo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kQuietNan = std::numeric_limits<float>::quiet_NaN();

/// The value of an e4m3 code by its definition: sign, 4 bits of exponent (bias 7), 3 of mantissa.
double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) {
    return std::nan("");
  }
  return sign * (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}

/// The nearest code by search over all of them, ties to the even code.
int nearest_e4m3(double value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) {
    return sign | 0x7F;
  }
  int best = 0;
  for (int code = 1; code < 0x7F; ++code) {
    const double before = std::fabs(e4m3_value(best) - magnitude);
    const double now = std::fabs(e4m3_value(code) - magnitude);
    if (now < before || (now == before && code % 2 == 0)) {
      best = code;
    }
  }
  return sign | (std::isinf(value) ? 0x7E : best);
}

TEST(NumberFormats, E4m3DecodesAllCodes) {
  for (int code = 0; code < 256; ++code) {
    const float decoded = from_e4m3(static_cast<std::uint8_t>(code));
    const double expected = e4m3_value(code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(decoded)) << code;
    } else {
      EXPECT_EQ(decoded, expected) << code;
    }
    EXPECT_EQ(std::signbit(decoded), code >= 128) << code;
    EXPECT_EQ(bits_of(e4m3_values()[static_cast<std::size_t>(code)]), bits_of(decoded)) << code;
    EXPECT_EQ(to_e4m3(decoded), code);
  }
}

TEST(NumberFormats, E4m3RoundsToNearestEven) {
  for (int code = 0; code < 0x7E; ++code) {
    const float middle = static_cast<float>((e4m3_value(code) + e4m3_value(code + 1)) / 2);
    for (const float value : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, kInf)}) {
      EXPECT_EQ(to_e4m3(value), nearest_e4m3(value)) << value;
      EXPECT_EQ(to_e4m3(-value), nearest_e4m3(-value)) << value;
    }
  }
  std::mt19937 engine(1);
  for (int i = 0; i < 20000; ++i) {
    const float value = float_of(static_cast<std::uint32_t>(engine()));
    EXPECT_EQ(to_e4m3(value), nearest_e4m3(value)) << value;
  }
}

TEST(NumberFormats, E4m3SaturatesAndKeepsNan) {
  EXPECT_EQ(to_e4m3(449.0F), 0x7E);
  EXPECT_EQ(to_e4m3(480.0F), 0x7E);
  EXPECT_EQ(to_e4m3(kInf), 0x7E);
  EXPECT_EQ(to_e4m3(-kInf), 0xFE);
  EXPECT_EQ(to_e4m3(kQuietNan), 0x7F);
  EXPECT_EQ(to_e4m3(-kQuietNan), 0xFF);
  EXPECT_EQ(to_e4m3(0.0F), 0x00);
  EXPECT_EQ(to_e4m3(-0.0F), 0x80);
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::denorm_min()), 0x00);
}

TEST(NumberFormats, Bf16RoundsAllValuesAroundTies) {
  for (std::uint32_t upper = 0; upper < 0x10000U; ++upper) {
    if ((upper & 0x7F80U) == 0x7F80U) {
      continue;  // inf and NaN, below
    }
    for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const bool up = lower > 0x8000U || (lower == 0x8000U && upper % 2 == 1);
      EXPECT_EQ(to_bf16(float_of(upper << 16 | lower)), upper + (up ? 1U : 0U)) << upper << " " << lower;
    }
    EXPECT_EQ(bits_of(from_bf16(static_cast<std::uint16_t>(upper))), upper << 16);
  }
}

TEST(NumberFormats, Bf16KeepsInfinitiesAndNan) {
  EXPECT_EQ(to_bf16(kInf), 0x7F80);
  EXPECT_EQ(to_bf16(-kInf), 0xFF80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  for (const std::uint32_t bits : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU, 0xFF800001U, 0xFFFFFFFFU}) {
    EXPECT_TRUE(std::isnan(from_bf16(to_bf16(float_of(bits))))) << bits;
  }
}

TEST(NumberFormats, ScaleIsTheSmallestPowerOfTwo) {
  std::mt19937 engine(2);
  for (int i = 0; i < 20000; ++i) {
    const float amax = float_of(static_cast<std::uint32_t>(engine()) & 0x7FFFFFFFU);
    if (std::isnan(amax) || std::isinf(amax) || amax == 0.0F) {
      continue;
    }
    int exponent = -126;
    while (exponent < 127 && static_cast<double>(amax) > std::ldexp(448.0, exponent)) {
      ++exponent;
    }
    EXPECT_EQ(power_of_two_scale(amax), std::ldexp(1.0F, exponent)) << amax;
  }
  EXPECT_EQ(power_of_two_scale(0.0F), 1.0F);
  EXPECT_EQ(power_of_two_scale(448.0F), 1.0F);
  EXPECT_EQ(power_of_two_scale(std::nextafter(448.0F, kInf)), 2.0F);
  EXPECT_EQ(power_of_two_scale(std::nextafter(448.0F, 0.0F)), 1.0F);
  EXPECT_EQ(power_of_two_scale(224.0F), 0.5F);
  EXPECT_EQ(power_of_two_scale(std::numeric_limits<float>::denorm_min()), std::ldexp(1.0F, -126));
  EXPECT_EQ(power_of_two_scale(std::numeric_limits<float>::max()), std::ldexp(1.0F, 120));
  EXPECT_EQ(power_of_two_scale(kInf), std::ldexp(1.0F, 120));
}

TEST(NumberFormats, GroupScaleIgnoresNan) {
  const float values[] = {kQuietNan, -3.0F, 0.5F, kQuietNan};
  EXPECT_EQ(e4m3_group_scale(values, 4), power_of_two_scale(3.0F));
  const float nothing[] = {kQuietNan, kQuietNan};
  EXPECT_EQ(e4m3_group_scale(nothing, 2), 1.0F);
}

TEST(NumberFormats, OrderedKeyOrdersAllKinds) {
  const float ascending[] = {kQuietNan, -kInf, -std::numeric_limits<float>::max(), -1.0F, -1e-40F, 0.0F,
                             1e-40F,    1.0F,  std::numeric_limits<float>::max(),  kInf};
  for (std::size_t i = 1; i < std::size(ascending); ++i) {
    EXPECT_LT(ordered_key(ascending[i - 1]), ordered_key(ascending[i])) << i;
  }
  EXPECT_EQ(ordered_key(-0.0F), ordered_key(0.0F));
  EXPECT_EQ(ordered_key(kQuietNan), ordered_key(-kQuietNan));
  EXPECT_TRUE(std::isnan(value_of_key(ordered_key(kQuietNan))));
  for (const float value : std::span(ascending).subspan(1)) {
    EXPECT_EQ(value_of_key(ordered_key(value)), value);
  }
}

}  // namespace
}  // namespace echo
