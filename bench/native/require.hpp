#pragma once

#include <cstdint>
#include <string>

#include "echo/errors.hpp"

namespace echo::bench {

/// Throws InvalidArgument naming the field.
inline void require(bool right, const char* field, std::int64_t value, const std::string& expected) {
  if (!right) {
    throw InvalidArgument(std::string(field) + ": " + std::to_string(value) + " given, expected " + expected);
  }
}

}  // namespace echo::bench
