#pragma once

#include <cstddef>

#include "echo/array.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Encodes the elements of one KV row (latent + rope) into its stored bytes. NotSupported for raw
/// rows.
void encode_row(const float* values, const ShapeView& shape, std::byte* row);

/// The elements of a stored row. NotSupported for raw rows.
void decode_row(const std::byte* row, const ShapeView& shape, float* values);

}  // namespace echo
