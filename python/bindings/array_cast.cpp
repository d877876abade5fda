#include "array_cast.hpp"

#include "echo/errors.hpp"

namespace nb = nanobind;

namespace echo::python {
namespace {

constexpr auto kBfloat = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);

[[noreturn]] void refuse(const char* name, const std::string& given, const std::string& expected) {
  throw InvalidArgument(std::string(name) + ": " + given + " given, expected " + expected);
}

/// Name of the type of any object.
std::string kind_of(nb::handle object) { return std::string(nb::inst_name(object).c_str()); }

bool matches(const nb::dlpack::dtype& type, std::uint8_t code, std::uint8_t bits) {
  return type.code == code && type.bits == bits && type.lanes == 1;
}

DType dtype_of(const nb::dlpack::dtype& type, const char* name) {
  using Code = nb::dlpack::dtype_code;
  if (matches(type, static_cast<std::uint8_t>(Code::Float), 32)) {
    return DType::f32;
  }
  if (matches(type, kBfloat, 16)) {
    return DType::bf16;
  }
  if (matches(type, static_cast<std::uint8_t>(Code::Int), 32)) {
    return DType::i32;
  }
  if (matches(type, static_cast<std::uint8_t>(Code::UInt), 8)) {
    return DType::u8;
  }
  static constexpr const char* kKinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string kind =
      type.code < std::size(kKinds) ? kKinds[type.code] : "type " + std::to_string(type.code) + " of ";
  refuse(name, kind + std::to_string(type.bits), "float32, bfloat16, int32 or uint8 (FP8 crosses as uint8)");
}

Array view(const nb::ndarray<nb::ro>& nd, const char* name, const std::string& device) {
  const bool on_cpu = nd.device_type() == nb::device::cpu::value;
  const std::string where = on_cpu                                        ? "cpu"
                            : nd.device_type() == nb::device::cuda::value ? "cuda:" + std::to_string(nd.device_id())
                                                                          : "another device";
  if (where != device) {
    refuse(name, "an array on " + where, "one on " + device);
  }
  if (nd.ndim() < 1 || nd.ndim() > Array::kMaxDims) {  // an Array without dimensions means "absent"
    refuse(name, std::to_string(nd.ndim()) + " dimensions", "1 to 4");
  }
  Array array;
  array.data = const_cast<void*>(static_cast<const void*>(nd.data()));
  array.dtype = dtype_of(nd.dtype(), name);
  array.dims = static_cast<int>(nd.ndim());
  std::int64_t stride = 1;
  for (std::size_t i = nd.ndim(); i-- > 0;) {
    array.shape[i] = static_cast<std::int64_t>(nd.shape(i));
    if (nd.size() > 0 && nd.shape(i) > 1 && nd.stride(i) != stride) {
      refuse(name, "an array that is not contiguous", "a contiguous (row-major) one");
    }
    stride *= array.shape[i];
  }
  return array;
}

}  // namespace

HeldArray to_array(nb::handle object, const char* name, const std::string& device, bool output) {
  if (object.is_none()) {
    return {};
  }
  // DLPack would hand over the bytes and silently cut the graph.
  if (const nb::object gradient = nb::getattr(object, "requires_grad", nb::none()); gradient.is(nb::bool_(true))) {
    refuse(name, "an array with gradients", "one without (detached, or computed under torch.no_grad)");
  }
  if (output) {  // the same array again, but refused where it is read-only
    nb::ndarray<> writable;
    if (!nb::try_cast(object, writable, false)) {
      refuse(name, kind_of(object), "a writable array (DLPack)");
    }
  }
  nb::ndarray<nb::ro> nd;
  if (!nb::try_cast(object, nd, false)) {
    refuse(name, kind_of(object), "an array (DLPack)");
  }
  const Array array = view(nd, name, device);
  return {array, std::move(nd)};
}

nb::capsule keep(std::shared_ptr<const void> owner) {
  auto* held = new std::shared_ptr<const void>(std::move(owner));
  return nb::capsule(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<const void>*>(p); });
}

nb::object to_python(const Array& array, const std::string& device, std::shared_ptr<const void> owner) {
  std::size_t shape[Array::kMaxDims];
  for (int i = 0; i < array.dims; ++i) {
    shape[i] = static_cast<std::size_t>(array.shape[static_cast<std::size_t>(i)]);
  }
  const nb::dlpack::dtype type = array.dtype == DType::i32 ? nb::dtype<std::int32_t>() : nb::dtype<float>();
  const auto dims = static_cast<std::size_t>(array.dims);
  if (device == "cpu") {
    return nb::cast(nb::ndarray<nb::numpy>(array.data, dims, shape, keep(std::move(owner)), nullptr, type));
  }
  const int number = std::stoi(device.substr(device.find(':') + 1));
  return nb::cast(nb::ndarray<nb::array_api>(array.data, dims, shape, keep(std::move(owner)), nullptr, type,
                                             nb::device::cuda::value, number));
}

}  // namespace echo::python
