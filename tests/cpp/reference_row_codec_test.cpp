#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"
#include "reference/float_io.hpp"
#include "reference/row_codec.hpp"
#include "reference_world.hpp"

namespace echo::reference_test {
namespace {

ShapeView shape_of(RowFormat format) { return small_shape(format, IndexKeyFormat::fp32); }

std::vector<std::byte> encoded(const std::vector<float>& values, RowFormat format) {
  const ShapeView shape = shape_of(format);
  std::vector<std::byte> row(static_cast<std::size_t>(row_bytes_of(shape)));
  encode_row(values.data(), shape, row.data());
  return row;
}

std::vector<float> decoded(const std::vector<std::byte>& row, RowFormat format) {
  const ShapeView shape = shape_of(format);
  std::vector<float> values(static_cast<std::size_t>(shape.latent_dim + shape.rope_dim));
  decode_row(row.data(), shape, values.data());
  return values;
}

/// One group of 128 latents by the book, in double: 128 codes by search, one scale.
void check_fp8_group(const float* values, const std::byte* codes, float scale) {
  double amax = 0.0;
  for (int i = 0; i < 128; ++i) {
    amax = std::isnan(values[i]) ? amax : std::max(amax, std::fabs(static_cast<double>(values[i])));
  }
  int exponent = 0;
  EXPECT_EQ(std::frexp(scale, &exponent), 0.5F) << "no power of two";
  EXPECT_LE(amax, 448.0 * scale);
  EXPECT_GT(amax, 224.0 * scale) << "not the smallest";
  for (int i = 0; i < 128; ++i) {
    const double exact = static_cast<double>(values[i]) / scale;
    double best = std::numeric_limits<double>::infinity();
    for (int code = 0; code < 256; ++code) {
      const double value = from_e4m3(static_cast<std::uint8_t>(code));
      best = std::isnan(value) ? best : std::min(best, std::fabs(value - exact));
    }
    const double chosen = from_e4m3(static_cast<std::uint8_t>(codes[i]));
    EXPECT_EQ(std::fabs(chosen - exact), best) << i;
  }
}

TEST(RowCodec, Fp8RowHasTheLayoutOf656Bytes) {
  std::vector<float> values = normal_floats(576, 1);
  for (int i = 0; i < 512; ++i) {
    values[static_cast<std::size_t>(i)] *= std::ldexp(1.0F, 5 * (i / 128) - 7);  // groups of different size
  }
  const std::vector<std::byte> row = encoded(values, RowFormat::fp8_656);
  ASSERT_EQ(row.size(), 656U);
  const std::vector<float> back = decoded(row, RowFormat::fp8_656);
  for (std::size_t group = 0; group < 4; ++group) {
    float scale = 0.0F;
    std::memcpy(&scale, row.data() + 512 + 4 * group, sizeof scale);
    check_fp8_group(values.data() + 128 * group, row.data() + 128 * group, scale);
    for (std::size_t i = 128 * group; i < 128 * (group + 1); ++i) {
      EXPECT_EQ(back[i], from_e4m3(static_cast<std::uint8_t>(row[i])) * scale);
      EXPECT_EQ(from_bf16(to_bf16(back[i])), back[i]) << "not exact in bf16";
    }
  }
  for (std::size_t i = 0; i < 64; ++i) {
    std::uint16_t rope = 0;
    std::memcpy(&rope, row.data() + 528 + 2 * i, sizeof rope);
    EXPECT_EQ(rope, to_bf16(values[512 + i]));
    EXPECT_EQ(back[512 + i], from_bf16(rope));
  }
}

TEST(RowCodec, EncodingWhatWasDecodedChangesNothing) {
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152, RowFormat::fp32}) {
    const ShapeView shape = shape_of(format);
    const auto row = encoded(normal_floats(static_cast<std::size_t>(shape.latent_dim + shape.rope_dim), 2), format);
    EXPECT_TRUE(same_bits(encoded(decoded(row, format), format), row)) << to_string(format);
  }
}

TEST(RowCodec, ZeroAndNanGroups) {
  std::vector<float> values(576, 0.0F);
  values[130] = std::numeric_limits<float>::quiet_NaN();
  values[131] = 2.0F;
  const std::vector<std::byte> row = encoded(values, RowFormat::fp8_656);
  float scales[4];
  std::memcpy(scales, row.data() + 512, sizeof scales);
  EXPECT_EQ(scales[0], 1.0F);
  EXPECT_EQ(scales[1], std::ldexp(1.0F, -7));  // 2 / 448 rounded up to a power of two
  const std::vector<float> back = decoded(row, RowFormat::fp8_656);
  EXPECT_TRUE(std::isnan(back[130]));
  EXPECT_EQ(back[131], 2.0F);
}

TEST(RowCodec, Bf16AndFp32Rows) {
  const std::vector<float> values = normal_floats(576, 3);
  const std::vector<float> bf16 = decoded(encoded(values, RowFormat::bf16_1152), RowFormat::bf16_1152);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(bf16[i], from_bf16(to_bf16(values[i])));
  }
  const std::vector<float> few = normal_floats(48, 4);
  EXPECT_TRUE(same_bits(decoded(encoded(few, RowFormat::fp32), RowFormat::fp32), few));
}

TEST(RowCodec, RawRowsAreRefused) {
  std::vector<std::byte> row(48);
  std::vector<float> values(576);
  EXPECT_THROW(encode_row(values.data(), shape_of(RowFormat::raw), row.data()), NotSupported);
  EXPECT_THROW(decode_row(row.data(), shape_of(RowFormat::raw), values.data()), NotSupported);
}

TEST(FloatIo, OtherTypesAreRefused) {
  std::int32_t word = 0;
  float value = 0.0F;
  EXPECT_THROW(load_floats(&word, DType::i32, 0, 1, &value), InvalidArgument);
  EXPECT_THROW(store_floats(&value, 1, &word, DType::u8, 0), InvalidArgument);
}

}  // namespace
}  // namespace echo::reference_test
