// Stored KV rows <-> floats.
//   fp8_656    e4m3 [latent] | fp32 scale [latent / 128] | bf16 [rope]
//   bf16_1152  bf16 [latent + rope]
//   fp32       fp32 [latent + rope]
// Decoding takes one table look-up per element, 0.3 us for a row of 576: attention over the row
// costs far more.
#include "reference/row_codec.hpp"

#include <cstring>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"
#include "reference/e4m3_codec.hpp"
#include "reference/float_io.hpp"

namespace echo {
namespace {

constexpr std::int32_t kGroup = kFp8Group;

void encode_fp8_row(const float* values, const ShapeView& shape, std::byte* row) {
  auto* codes = reinterpret_cast<std::uint8_t*>(row);
  std::byte* scales = row + shape.latent_dim;
  for (std::int32_t first = 0; first < shape.latent_dim; first += kGroup) {
    const float scale = encode_e4m3_group(values + first, kGroup, codes + first);
    std::memcpy(scales, &scale, sizeof scale);
    scales += sizeof scale;
  }
  store_floats(values + shape.latent_dim, shape.rope_dim, scales, DType::bf16, 0);
}

void decode_fp8_row(const std::byte* row, const ShapeView& shape, float* values) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row);
  const std::byte* scales = row + shape.latent_dim;
  const float* table = e4m3_values().data();
  for (std::int32_t first = 0; first < shape.latent_dim; first += kGroup) {
    float scale = 0.0F;
    std::memcpy(&scale, scales, sizeof scale);
    scales += sizeof scale;
    for (std::int32_t i = first; i < first + kGroup; ++i) {
      values[i] = table[codes[i]] * scale;
    }
  }
  load_floats(scales, DType::bf16, 0, shape.rope_dim, values + shape.latent_dim);
}

[[noreturn]] void refuse_raw() {
  throw NotSupported(
      "row_format: only the writer of raw rows understands them; choose fp8_656, bf16_1152 or "
      "fp32");
}

}  // namespace

void encode_row(const float* values, const ShapeView& shape, std::byte* row) {
  switch (shape.row_format) {
    case RowFormat::fp8_656:
      return encode_fp8_row(values, shape, row);
    case RowFormat::bf16_1152:
      return store_floats(values, shape.latent_dim + shape.rope_dim, row, DType::bf16, 0);
    case RowFormat::fp32:
      return store_floats(values, shape.latent_dim + shape.rope_dim, row, DType::f32, 0);
    case RowFormat::raw:
      break;
  }
  refuse_raw();
}

void decode_row(const std::byte* row, const ShapeView& shape, float* values) {
  switch (shape.row_format) {
    case RowFormat::fp8_656:
      return decode_fp8_row(row, shape, values);
    case RowFormat::bf16_1152:
      return load_floats(row, DType::bf16, 0, shape.latent_dim + shape.rope_dim, values);
    case RowFormat::fp32:
      return load_floats(row, DType::f32, 0, shape.latent_dim + shape.rope_dim, values);
    case RowFormat::raw:
      break;
  }
  refuse_raw();
}

}  // namespace echo
