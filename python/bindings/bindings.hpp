#pragma once
// One file per public header; each registers its classes with the module.

#include <nanobind/nanobind.h>

namespace echo::python {

void register_errors(nanobind::module_& module);
void register_model_shape(nanobind::module_& module);
void register_runtime_config(nanobind::module_& module);
void register_planner(nanobind::module_& module);
void register_device_report(nanobind::module_& module);
void register_session(nanobind::module_& module);
void register_stats(nanobind::module_& module);
void register_kv_runs(nanobind::module_& module);
void register_forward_pass(nanobind::module_& module);
void register_runtime(nanobind::module_& module);

}  // namespace echo::python
