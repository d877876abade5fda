#include "reference/float_io.hpp"

#include <cstring>

#include "echo/errors.hpp"
#include "kernels/number_formats.hpp"

namespace echo {
namespace {

[[noreturn]] void refuse(DType dtype) {
  throw InvalidArgument("dtype: " + to_string(dtype) + " given, expected f32 or bf16");
}

}  // namespace

void load_floats(const void* array, DType dtype, std::int64_t first, std::int64_t count, float* out) {
  if (dtype == DType::f32) {
    std::memcpy(out, static_cast<const float*>(array) + first, static_cast<std::size_t>(count) * sizeof(float));
  } else if (dtype == DType::bf16) {
    const std::uint16_t* values = static_cast<const std::uint16_t*>(array) + first;
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = from_bf16(values[i]);
    }
  } else {
    refuse(dtype);
  }
}

void store_floats(const float* values, std::int64_t count, void* array, DType dtype, std::int64_t first) {
  if (dtype == DType::f32) {
    std::memcpy(static_cast<float*>(array) + first, values, static_cast<std::size_t>(count) * sizeof(float));
  } else if (dtype == DType::bf16) {
    std::uint16_t* out = static_cast<std::uint16_t*>(array) + first;
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = to_bf16(values[i]);
    }
  } else {
    refuse(dtype);
  }
}

}  // namespace echo
