#include "echo/stats.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>

#include "bindings.hpp"

namespace nb = nanobind;

namespace echo::python {

void register_stats(nb::module_& module) {
  nb::class_<LayerStats>(module, "LayerStats", "Counters of one layer's GPU pool since construction.")
      .def_ro("hits", &LayerStats::hits, "Entries of selections for which nothing had to be fetched.")
      .def_ro("misses", &LayerStats::misses, "Selected rows that a recall fetched.")
      .def_ro("evictions", &LayerStats::evictions, "Slots that were taken from another row.")
      .def_ro("appended", &LayerStats::appended, "Rows of new tokens written to a slot and to the host.")
      .def_ro("lost_races", &LayerStats::lost_races, "Hits whose row was just being fetched for another entry.")
      .def_ro("recalled_bytes", &LayerStats::recalled_bytes, "Bytes of the rows fetched.")
      .def_ro("candidates", &LayerStats::candidates, "Tokens that a score listed for its select.")
      .def_ro("full_selects", &LayerStats::full_selects,
              "Query rows whose candidates did not do: all scores were searched.")
      .def_ro("prefetched", &LayerStats::prefetched, "Rows fetched while scoring; not among the misses.")
      .def_ro("prefetched_used", &LayerStats::prefetched_used, "Of them, those selected in the same step.")
      .def_ro("prefetched_wasted", &LayerStats::prefetched_wasted, "Of them, those not selected in that step.")
      .def_ro("prefetches_capped", &LayerStats::prefetches_capped,
              "Rows and tokens that were not prefetched because of the cap, or because a queue was full. Where it "
              "is full on a GPU, rows that others were fetching count, too.")
      .def_ro("prefetched_bytes", &LayerStats::prefetched_bytes, "Bytes of the rows prefetched.")
      .def_ro("forecast", &LayerStats::forecast, "Rows fetched for the next step; not among the misses.")
      .def_ro("forecast_used", &LayerStats::forecast_used,
              "Of them, those selected in a later step, while they were still there.")
      .def_ro("forecast_wasted", &LayerStats::forecast_wasted, "Of them, those not used so far.")
      .def_ro("forecast_bytes", &LayerStats::forecast_bytes, "Bytes of the rows forecast.")
      .def_ro("used_slots", &LayerStats::used_slots, "Slots that hold a row now.");
  nb::class_<RuntimeStats>(module, "RuntimeStats", "What a runtime did so far.")
      .def_ro("layers", &RuntimeStats::layers)
      .def_ro("steps", &RuntimeStats::steps, "Decode steps done.")
      .def_ro("prefill_tokens", &RuntimeStats::prefill_tokens)
      .def_ro("sessions", &RuntimeStats::sessions, "Sessions open now.")
      .def_ro("free_host_tokens", &RuntimeStats::free_host_tokens,
              "Tokens that sessions could still be opened for, in blocks of 64.")
      .def_ro("host_tokens", &RuntimeStats::host_tokens)
      .def_ro("device_bytes", &RuntimeStats::device_bytes, "Device memory allocated at construction.")
      .def_ro("host_bytes", &RuntimeStats::host_bytes, "Host memory allocated at construction.")
      .def_ro("row_bytes", &RuntimeStats::row_bytes)
      .def_prop_ro("recalled_bytes", &RuntimeStats::recalled_bytes,
                   "Bytes that recalls fetched from the host, all layers; prefetches and forecasts come on top.")
      .def_prop_ro("prefetched_bytes", &RuntimeStats::prefetched_bytes, "Bytes prefetched, all layers.")
      .def_prop_ro("forecast_bytes", &RuntimeStats::forecast_bytes, "Bytes forecast, all layers.")
      .def_prop_ro("hit_rate", &RuntimeStats::hit_rate, "hits / (hits + misses), all layers.")
      .def("__repr__", [](const RuntimeStats& s) {
        std::int64_t missed = 0;
        std::int64_t prefetched = 0;
        std::int64_t used = 0;
        std::int64_t forecast = 0;
        std::int64_t forecast_used = 0;
        for (const LayerStats& layer : s.layers) {
          missed += layer.misses;
          prefetched += layer.prefetched;
          used += layer.prefetched_used;
          forecast += layer.forecast;
          forecast_used += layer.forecast_used;
        }
        return "<RuntimeStats, " + std::to_string(s.steps) + " steps, " + std::to_string(s.sessions) + " sessions, " +
               std::to_string(s.free_host_tokens) + " of " + std::to_string(s.host_tokens) +
               " host tokens free, hit rate " + std::to_string(s.hit_rate()) + ", rows missed " +
               std::to_string(missed) + ", prefetched " + std::to_string(prefetched) + ", of them used " +
               std::to_string(used) + ", forecast " + std::to_string(forecast) + ", of them used " +
               std::to_string(forecast_used) + ">";
      });
}

}  // namespace echo::python
