#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "echo/errors.hpp"
#include "echo/export.hpp"

namespace echo {

/// Element types that cross the API. FP8 (e4m3) bytes travel as `u8`.
enum class DType : std::uint8_t { f32, bf16, i32, u8 };

/// Size of one element in bytes.
ECHO_API std::size_t size_of(DType dtype);
ECHO_API std::string to_string(DType dtype);

/// View of a contiguous, row-major array in the memory of the runtime's device (host memory for the
/// CPU backend). It owns nothing. A default-made Array is "absent".
struct Array {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  DType dtype = DType::f32;
  int dims = 0;
  std::array<std::int64_t, kMaxDims> shape{};

  Array() = default;
  /// Throws InvalidArgument naming `shape` if it has more than kMaxDims extents.
  Array(void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_) : data(data_), dtype(dtype_) {
    if (shape_.size() > kMaxDims) {
      throw InvalidArgument("shape: " + std::to_string(shape_.size()) + " dimensions given, expected at most " +
                            std::to_string(kMaxDims));
    }
    for (std::int64_t extent : shape_) {
      shape[static_cast<std::size_t>(dims++)] = extent;
    }
  }
  /// An input may come from const memory: verbs only write to what is documented as an output.
  Array(const void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_)
      : Array(const_cast<void*>(data_), dtype_, shape_) {}

  explicit operator bool() const { return dims != 0; }
  std::int64_t elements() const {
    std::int64_t n = dims == 0 ? 0 : 1;
    for (int i = 0; i < dims; ++i) {
      n *= shape[static_cast<std::size_t>(i)];
    }
    return n;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

/// "f32[13, 576]"
ECHO_API std::string to_string(const Array& array);

}  // namespace echo
