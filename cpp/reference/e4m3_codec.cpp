#include "reference/e4m3_codec.hpp"

#include "kernels/number_formats.hpp"

namespace echo {

const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (std::size_t code = 0; code < table.size(); ++code) {
      table[code] = from_e4m3(static_cast<std::uint8_t>(code));
    }
    return table;
  }();
  return values;
}

float e4m3_group_scale(const float* values, std::int64_t count) {
  float amax = 0.0F;
  for (std::int64_t i = 0; i < count; ++i) {
    amax = amax_with(amax, values[i]);
  }
  return power_of_two_scale(amax);
}

float encode_e4m3_group(const float* values, std::int64_t count, std::uint8_t* codes) {
  const float scale = e4m3_group_scale(values, count);
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = to_e4m3(values[i] / scale);  // exact, or far below the smallest code
  }
  return scale;
}

}  // namespace echo
