#include "echo/planner.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "echo/host_memory.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {

void register_planner(nb::module_& module) {
  nb::class_<MachineLimits>(module, "MachineLimits", "Memory a runtime may use, in bytes; 0 means not checked.")
      .def(
          "__init__",
          [](MachineLimits* self, std::int64_t device_bytes, std::int64_t host_bytes) {
            new (self) MachineLimits{.device_bytes = device_bytes, .host_bytes = host_bytes};
          },
          nb::kw_only(), "device_bytes"_a = 0, "host_bytes"_a = 0)
      .def_ro("device_bytes", &MachineLimits::device_bytes)
      .def_ro("host_bytes", &MachineLimits::host_bytes);

  nb::class_<MemoryItem>(module, "MemoryItem", "One kind of allocation: `count` pieces of `bytes` each.")
      .def_ro("name", &MemoryItem::name)
      .def_prop_ro("place", [](const MemoryItem& i) { return i.place == MemoryPlace::host ? "host" : "device"; })
      .def_ro("bytes", &MemoryItem::bytes)
      .def_ro("count", &MemoryItem::count)
      .def_ro("formula", &MemoryItem::formula)
      .def_prop_ro("total", &MemoryItem::total);

  nb::class_<Plan>(module, "Plan", "All sizes of a runtime, computed before any memory is touched.")
      .def_ro("shape", &Plan::shape)
      .def_ro("config", &Plan::config, "Settings with automatic values filled in.")
      .def_ro("limits", &Plan::limits)
      .def_ro("host_blocks", &Plan::host_blocks, "Blocks of 64 tokens in the host pool.")
      .def_ro("minimum_slots", &Plan::minimum_slots, "Least slots per layer: max_batch x query_rows x (top_k + 1).")
      .def_ro("host_row_stride", &Plan::host_row_stride, "Bytes between rows in the host pool.")
      .def_ro("block_rows", &Plan::block_rows, "Most query rows scored and recalled together.")
      .def_ro("items", &Plan::items)
      .def_prop_ro("device_bytes", [](const Plan& plan) { return plan.total(MemoryPlace::device); })
      .def_prop_ro("host_bytes", [](const Plan& plan) { return plan.total(MemoryPlace::host); })
      .def_prop_ro("fits", &Plan::fits, "Whether it fits the limits.")
      .def("sessions_of", &Plan::sessions_of, "tokens"_a,
           "Sessions of this many tokens (prompt and output) that fit the host pool at once.")
      .def("__repr__", [](const Plan& plan) { return "<Plan\n" + plan.table() + ">"; })
      .def("table", &Plan::table, "What was asked and what there is, for people.");

  module.def("make_plan", &make_plan, "shape"_a, "config"_a, "limits"_a = MachineLimits{},
             "Checks shape and settings and computes all sizes; touches no memory.\n\n"
             "Raises:\n    InvalidArgument: naming the field.");
  module.def("machine_limits", &machine_limits, "device"_a = "auto", "What this machine offers now.");
  module.def("keep_host_memory", &keep_host_memory, "on"_a,
             "While on, pinned host memory of a runtime that is closed stays with the process, for the next runtime\n"
             "that needs exactly as much on the same GPU: pinning 100 GB takes seconds, as for who compares settings.\n"
             "Turned off (which it is at first), everything that was kept is given back. Does nothing on the CPU.\n\n"
             "Args:\n    on: whether to keep it; False gives back what is kept.");
}

}  // namespace echo::python
