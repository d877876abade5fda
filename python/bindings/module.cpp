#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "echo/runtime.hpp"

NB_MODULE(_core, module) {
  using namespace echo::python;
  nanobind::set_leak_warnings(false);  // whoever holds an object in a global at exit has done nothing wrong
  module.doc() = "The native part of echo. Use the names that `echo` exports.";
  register_errors(module);
  register_model_shape(module);
  register_runtime_config(module);
  register_planner(module);
  register_device_report(module);
  register_session(module);
  register_stats(module);
  register_kv_runs(module);
  register_forward_pass(module);
  register_runtime(module);
  module.def("build_info", &echo::build_info, "Version and what this build can run on, for people.");
}
