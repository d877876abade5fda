#pragma once

#include <array>
#include <cstdint>

namespace echo {

/// Values of the 256 e4m3 codes.
const std::array<float, 256>& e4m3_values();

/// The scale of a group of values: a power of two.
float e4m3_group_scale(const float* values, std::int64_t count);

/// Quantises a group of values that share one power-of-two scale, and returns the scale.
float encode_e4m3_group(const float* values, std::int64_t count, std::uint8_t* codes);

}  // namespace echo
