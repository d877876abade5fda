#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "echo/forward_pass.hpp"

namespace echo::python {

/// A ForwardPass as Python sees it: valid while the forward it was given to runs, refused afterwards.
class PassHandle {
 public:
  PassHandle(ForwardPass& pass, std::string device) : pass_(&pass), device_(std::move(device)) {}

  /// Throws StateError once the forward has returned.
  ForwardPass& get() const;
  const std::string& device() const { return device_; }
  void end() { pass_ = nullptr; }

 private:
  ForwardPass* pass_;
  std::string device_;
};

/// A Python callable as a Forward; empty for None. Holds the interpreter only while the callable runs.
Forward to_forward(nanobind::object callable, const std::string& device);

}  // namespace echo::python
