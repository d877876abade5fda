#pragma once

#include <cstdint>

#include "kernels/params.hpp"

namespace echo {

/// Bytes of one index key without its scale.
std::int32_t index_key_bytes(const ShapeView& shape);

/// Encodes the key of token `in_block` into its block of index keys.
void encode_index_key(const float* key, const ShapeView& shape, std::byte* block, std::int32_t in_block);

/// The scales of the 64 keys of a block: 1 where keys are not quantised.
void load_index_scales(const std::byte* block, const ShapeView& shape, float* scales);

/// The index query of one head as it enters the dot product: quantised like the keys, if they are.
/// Works in place and returns the factor that the dot product still needs.
float quantise_index_query(float* query, const ShapeView& shape);

}  // namespace echo
