#pragma once
// Arrays between Python (anything with DLPack) and the core. Nothing is ever converted or copied.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>

#include "echo/array.hpp"

namespace echo::python {

/// An Array and what keeps its memory: a producer may have made it just for this call.
struct HeldArray {
  Array array;
  nanobind::ndarray<nanobind::ro> held;
  explicit operator bool() const { return static_cast<bool>(array); }
};

/// Views a Python array; None gives an absent Array. Throws InvalidArgument naming `name` if it is no array, not
/// on `device` ("cpu", "cuda:N"), not contiguous, of a type that does not cross, or (outputs) not writable.
HeldArray to_array(nanobind::handle object, const char* name, const std::string& device, bool output = false);

/// An array of the core as a Python object: numpy on the CPU, else an object with `__dlpack__`. `owner` keeps its
/// memory alive.
nanobind::object to_python(const Array& array, const std::string& device, std::shared_ptr<const void> owner);

/// A capsule that holds `owner`.
nanobind::capsule keep(std::shared_ptr<const void> owner);

}  // namespace echo::python
