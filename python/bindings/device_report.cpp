#include "echo/device_report.hpp"

#include <nanobind/stl/string.h>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {

void register_device_report(nb::module_& module) {
  nb::class_<DeviceReport>(module, "DeviceReport", "What a GPU is and can do for a runtime, found out by trying.")
      .def_ro("problem", &DeviceReport::problem, "What is wrong, in words; empty if a runtime would work here.")
      .def_ro("devices", &DeviceReport::devices, "CUDA devices of this machine.")
      .def_ro("name", &DeviceReport::name)
      .def_ro("driver_version", &DeviceReport::driver_version, "Newest CUDA the driver supports, 13000 for 13.0.")
      .def_ro("runtime_version", &DeviceReport::runtime_version, "CUDA this build was made with.")
      .def_ro("compute_capability", &DeviceReport::compute_capability, "90 for 9.0.")
      .def_ro("multiprocessors", &DeviceReport::multiprocessors)
      .def_ro("numa_node", &DeviceReport::numa_node, "-1: one node, or unknown.")
      .def_ro("memory_bytes", &DeviceReport::memory_bytes)
      .def_ro("free_bytes", &DeviceReport::free_bytes)
      .def_ro("pinned_limit_bytes", &DeviceReport::pinned_limit_bytes, "Host memory that can still be pinned.")
      .def_ro("pin_gib_per_second", &DeviceReport::pin_gib_per_second, "Speed of taking pinned memory.")
      .def_ro("to_device_gb_per_second", &DeviceReport::to_device_gb_per_second, "One large copy, 10^9 bytes.")
      .def_ro("to_host_gb_per_second", &DeviceReport::to_host_gb_per_second, "One large copy, 10^9 bytes.");
  module.def("device_report", &device_report, "device"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
             "Looks at a CUDA device; takes 256 MiB of pinned and of device memory for a moment.");
}

}  // namespace echo::python
