#pragma once

#include <stdexcept>
#include <string>

#include "echo/export.hpp"

namespace echo {

/// Root of everything this library throws. Python sees the same names: `echo.Error`,
/// `echo.InvalidArgument`, ... (the Python classes also derive from ValueError, MemoryError, ...).
class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument is malformed. The message begins with the name of the argument. Nothing has changed.
class __attribute__((visibility("default"))) InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// What was asked for does not fit what there is (memory, host rows, sessions). Nothing has changed
/// and everything that runs goes on.
class __attribute__((visibility("default"))) CapacityError : public Error {
 public:
  using Error::Error;
};

/// The object is in no state for this call: a closed session or runtime, a verb out of order.
class __attribute__((visibility("default"))) StateError : public Error {
 public:
  using Error::Error;
};

/// A CUDA call failed. The runtime can only be closed afterwards.
class __attribute__((visibility("default"))) CudaError : public Error {
 public:
  using Error::Error;
};

/// This build or this device cannot do it, and says what could.
class __attribute__((visibility("default"))) NotSupported : public Error {
 public:
  using Error::Error;
};

}  // namespace echo
