#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "echo/errors.hpp"

namespace echo::python {

/// An argument that is to be an integer, as any object: nanobind's own refusal would name types, not the argument, and
/// of a number that is too large the type is right.
template <typename Number>
using Integer = nanobind::typed<nanobind::object, Number>;

/// Its value; InvalidArgument naming `name` if it is none (bool is none here), or too large.
template <typename Number>
Number integer(const char* name, const Integer<Number>& value) {
  Number number = 0;
  if (nanobind::isinstance<nanobind::bool_>(value) || !nanobind::try_cast(value, number)) {
    throw InvalidArgument(std::string(name) + ": " + nanobind::repr(value).c_str() + " given, expected an integer of " +
                          std::to_string(8 * sizeof(Number)) + " bits");
  }
  return number;
}

}  // namespace echo::python
