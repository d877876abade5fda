#include "reference/index_keys.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/number_formats.hpp"
#include "reference/e4m3_codec.hpp"

namespace echo {

std::int32_t index_key_bytes(const ShapeView& shape) {
  return shape.index_key_format == IndexKeyFormat::fp8 ? shape.index_dim
                                                       : shape.index_dim * static_cast<std::int32_t>(sizeof(float));
}

void encode_index_key(const float* key, const ShapeView& shape, std::byte* block, std::int32_t in_block) {
  const std::int32_t key_bytes = index_key_bytes(shape);
  std::byte* address = index_key_address(block, in_block, key_bytes);
  if (shape.index_key_format == IndexKeyFormat::fp32) {
    std::memcpy(address, key, static_cast<std::size_t>(key_bytes));
    return;
  }
  const float scale = encode_e4m3_group(key, shape.index_dim, reinterpret_cast<std::uint8_t*>(address));
  std::memcpy(index_scale_address(block, in_block, key_bytes), &scale, sizeof scale);
}

void load_index_scales(const std::byte* block, const ShapeView& shape, float* scales) {
  if (shape.index_key_format == IndexKeyFormat::fp32) {
    std::fill_n(scales, kTokensPerBlock, 1.0F);
    return;
  }
  std::memcpy(scales, index_scale_address(block, 0, index_key_bytes(shape)), kTokensPerBlock * sizeof(float));
}

float quantise_index_query(float* query, const ShapeView& shape) {
  if (shape.index_key_format == IndexKeyFormat::fp32) {
    return 1.0F;
  }
  const float scale = e4m3_group_scale(query, shape.index_dim);
  for (std::int32_t i = 0; i < shape.index_dim; ++i) {
    query[i] = from_e4m3(to_e4m3(query[i] / scale));
  }
  return scale;
}

}  // namespace echo
