#pragma once

#include <cstdint>

#include "echo/array.hpp"

namespace echo {

/// Elements [first, first + count) of an f32 or bf16 array as floats. Throws InvalidArgument for
/// other types.
void load_floats(const void* array, DType dtype, std::int64_t first, std::int64_t count, float* out);
/// Writes floats to elements [first, first + count) of an f32 or bf16 array, rounding to nearest
/// even.
void store_floats(const float* values, std::int64_t count, void* array, DType dtype, std::int64_t first);

}  // namespace echo
