#include "echo/runtime.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <type_traits>

#include "array_cast.hpp"
#include "bindings.hpp"
#include "forward_pass.hpp"
#include "integers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {
namespace {

template <typename T>
nb::object numpy_copy(std::vector<T>&& values, std::vector<std::size_t> shape) {
  auto held = std::make_shared<const std::vector<T>>(std::move(values));
  auto* data = const_cast<T*>(held->data());
  using Element = std::conditional_t<std::is_same_v<T, std::byte>, std::uint8_t, T>;
  return nb::cast(nb::ndarray<nb::numpy, Element>(data, shape.size(), shape.data(), keep(held)));
}

Session open_session(Runtime& self, const Integer<std::int64_t>& max_tokens) {
  const std::int64_t most = integer("max_tokens", max_tokens);
  const nb::gil_scoped_release release;
  return self.open_session(most);
}

KvRuns begin_import(Runtime& self, const Session& session, const Integer<std::int64_t>& tokens) {
  const std::int64_t count = integer("tokens", tokens);
  const nb::gil_scoped_release release;
  return self.begin_import(session, count);
}

void prefill(Runtime& self, const Session& session, const std::vector<std::int32_t>& tokens, nb::object forward) {
  const Forward model = to_forward(std::move(forward), self.device());
  const nb::gil_scoped_release release;
  self.prefill(session, tokens, model);
}

void step(Runtime& self, const std::vector<Session>& sessions, const std::vector<std::int32_t>& tokens,
          std::int32_t query_rows, nb::object forward) {
  Batch batch;
  batch.sessions = sessions;
  batch.tokens = tokens;
  batch.query_rows = query_rows;
  const Forward model = to_forward(std::move(forward), self.device());
  const nb::gil_scoped_release release;
  self.step(batch, model);
}

void capture(Runtime& self, nb::object forward, const nb::typed<nb::list, std::int32_t>& batch_sizes,
             const Integer<std::int32_t>& query_rows, const Capturer& capturer) {
  Forward model = to_forward(std::move(forward), self.device());
  const std::int32_t rows = integer("query_rows", query_rows);
  std::vector<std::int32_t> sizes;
  for (const nb::handle size : batch_sizes) {
    sizes.push_back(integer("batch_sizes", nb::borrow<Integer<std::int32_t>>(size)));
  }
  const nb::gil_scoped_release release;
  self.capture(std::move(model), sizes, rows, capturer);
}

nb::dict cache_state(const Runtime& self, const Integer<std::int32_t>& layer) {
  const std::int32_t number = integer("layer", layer);
  CacheState state;
  {
    const nb::gil_scoped_release release;
    state = self.cache_state(number);
  }
  const std::size_t slots = state.host_of.size();
  const std::size_t rows = state.slot_of.size();
  const auto row_bytes = static_cast<std::size_t>(self.plan().shape.row_bytes());
  nb::dict result;
  result["slot_of"] = numpy_copy(std::move(state.slot_of), {rows});
  result["host_of"] = numpy_copy(std::move(state.host_of), {slots});
  result["stamp"] = numpy_copy(std::move(state.stamp), {slots});
  result["slots"] = numpy_copy(std::move(state.slots), {slots, row_bytes});
  return result;
}

}  // namespace

void register_runtime(nb::module_& module) {
  nb::class_<Runtime>(module, "Runtime", "The native runtime; `echo.Runtime` documents it.")
      .def(nb::init<const ModelShape&, const RuntimeConfig&>(), "shape"_a, "config"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("plan", &Runtime::plan, nb::rv_policy::reference_internal)
      .def_prop_ro("device", &Runtime::device)
      .def_prop_ro("closed", &Runtime::closed)
      .def("open_session", &open_session, "max_tokens"_a)
      .def("prefill", &prefill, "session"_a, "tokens"_a, "forward"_a.none())
      .def("step", &step, "sessions"_a, "tokens"_a, "query_rows"_a, "forward"_a.none())
      .def("capture", &capture, "forward"_a.none(), "batch_sizes"_a, "query_rows"_a, "capturer"_a.none())
      .def("export_kv", &Runtime::export_kv, "session"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("import_kv", &Runtime::import_kv, "session"_a, "source"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("begin_import", &begin_import, "session"_a, "tokens"_a)
      .def("finish_import", &Runtime::finish_import, "session"_a, "filled"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "thresholds",
          [](const Runtime& self, const Session& session) {
            std::vector<float> values;
            {
              const nb::gil_scoped_release release;
              values = self.thresholds(session);
            }
            const std::size_t layers = values.size();
            return numpy_copy(std::move(values), {layers});
          },
          "session"_a)
      .def_prop_ro("free_host_tokens", &Runtime::free_host_tokens)
      .def("stats", &Runtime::stats, nb::call_guard<nb::gil_scoped_release>())
      .def("cache_state", &cache_state, "layer"_a,
           nb::sig("def cache_state(self, layer: int) -> dict[str, typing.Any]"))
      .def(
          "use_stream",
          [](Runtime& self, const Integer<std::uintptr_t>& stream) { self.use_stream(integer("stream", stream)); },
          "stream"_a)
      .def("synchronize", &Runtime::synchronize, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Runtime::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace echo::python
