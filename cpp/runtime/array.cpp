#include "echo/array.hpp"

namespace echo {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

std::string to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  return "?";
}

std::string to_string(const Array& array) {
  if (!array) {
    return "nothing";
  }
  std::string text = to_string(array.dtype) + "[";
  for (int i = 0; i < array.dims; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(array.shape[static_cast<std::size_t>(i)]);
  }
  return text + "]";
}

}  // namespace echo
