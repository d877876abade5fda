#include "echo/kv_runs.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <string>

#include "array_cast.hpp"
#include "bindings.hpp"
#include "echo/errors.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {
namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>>;
using ReadOnlyBytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<2>>;

std::size_t checked_layer(const KvRuns& kv, std::int64_t layer) {
  if (layer < 0 || layer >= std::ssize(kv.index_keys)) {
    throw InvalidArgument("layer: " + std::to_string(layer) + " given, expected 0 to " +
                          std::to_string(std::ssize(kv.index_keys) - 1));
  }
  return static_cast<std::size_t>(layer);
}

nb::list rows_of(const KvRuns& kv, std::int64_t layer) {
  nb::list views;
  for (const KvRun& run : kv.rows[checked_layer(kv, layer)]) {
    const std::size_t shape[] = {static_cast<std::size_t>(run.tokens), static_cast<std::size_t>(kv.row_bytes)};
    const std::int64_t strides[] = {run.stride, 1};
    if (kv.writable) {
      views.append(nb::cast(Bytes(run.rows, 2, shape, keep(kv.keep_alive), strides)));
    } else {
      views.append(nb::cast(ReadOnlyBytes(run.rows, 2, shape, keep(kv.keep_alive), strides)));
    }
  }
  return views;
}

/// Keeps foreign arrays alive; they may only be dropped while the interpreter is held.
std::shared_ptr<const void> keep_object(nb::object object) {
  return {object.release().ptr(), [](const void* pointer) {
            const nb::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(const_cast<void*>(pointer)));
          }};
}

/// Rows and index keys that lie anywhere, for import.
KvRuns from_arrays(const nb::sequence& given_rows, const nb::sequence& given_keys) {
  const nb::list rows(given_rows);
  const nb::list index_keys(given_keys);
  if (rows.size() == 0 || rows.size() != index_keys.size()) {
    throw InvalidArgument("rows: " + std::to_string(rows.size()) + " layers given and " +
                          std::to_string(index_keys.size()) + " of index_keys, expected the same number, at least 1");
  }
  KvRuns kv;
  nb::list owners;
  kv.thresholds.assign(rows.size(), std::numeric_limits<float>::quiet_NaN());
  kv.deviations = kv.thresholds;
  for (std::size_t layer = 0; layer < rows.size(); ++layer) {
    const HeldArray held = to_array(rows[layer], "rows", "cpu");
    const Array& array = held.array;
    const HeldArray held_keys = to_array(index_keys[layer], "index_keys", "cpu");
    const Array& keys = held_keys.array;
    owners.append(nb::cast(held.held));
    if (array.dtype != DType::u8 || array.dims != 2 || array.elements() == 0 ||
        (layer > 0 && (array.shape[0] != kv.length || array.shape[1] != kv.row_bytes))) {
      throw InvalidArgument("rows: layer " + std::to_string(layer) + " is " + to_string(array) +
                            ", expected u8 [tokens, row_bytes], the same in all layers");
    }
    if (keys.dtype != DType::u8 || keys.dims != 2 || keys.elements() == 0 ||
        (layer > 0 && keys.shape[1] != kv.index_block_bytes)) {
      throw InvalidArgument("index_keys: layer " + std::to_string(layer) + " is " + to_string(keys) +
                            ", expected u8 [blocks, index_block_bytes]");
    }
    kv.length = array.shape[0];
    kv.row_bytes = array.shape[1];
    kv.index_block_bytes = keys.shape[1];
    kv.rows.push_back(
        {{.first_token = 0, .tokens = array.shape[0], .rows = array.as<std::byte>(), .stride = array.shape[1]}});
    kv.index_keys.emplace_back(keys.as<std::byte>(), keys.as<std::byte>() + keys.elements());
  }
  kv.keep_alive = keep_object(std::move(owners));
  return kv;
}

}  // namespace

void register_kv_runs(nb::module_& module) {
  nb::class_<KvRuns>(module, "KvRuns",
                     "The KV of one session: rows on the host as views, index keys as a copy.\n\n"
                     "Made by Runtime.export_kv (read-only rows) and Runtime.begin_import (writable rows), or by\n"
                     "KvRuns.from_arrays. Views stay valid after the runtime is closed.")
      .def("__repr__",
           [](const KvRuns& kv) {
             return "<KvRuns, " + std::to_string(kv.length) + " tokens, " + std::to_string(kv.index_keys.size()) +
                    " layers, rows of " + std::to_string(kv.row_bytes) + (kv.writable ? " B, writable>" : " B>");
           })
      .def_ro("length", &KvRuns::length, "Tokens.")
      .def_ro("row_bytes", &KvRuns::row_bytes)
      .def_prop_ro("layers", [](const KvRuns& kv) { return kv.index_keys.size(); })
      .def_prop_rw(
          "thresholds", [](const KvRuns& kv) { return kv.thresholds; },
          [](KvRuns& kv, std::vector<float> values) { kv.thresholds = std::move(values); },
          "Predicted k-th score of each layer, NaN where unknown.")
      .def_prop_rw(
          "deviations", [](const KvRuns& kv) { return kv.deviations; },
          [](KvRuns& kv, std::vector<float> values) { kv.deviations = std::move(values); },
          "How far off those predictions are on average, NaN where unknown.")
      .def("rows", &rows_of, "layer"_a,
           nb::sig("def rows(self, layer: int) -> list[numpy.typing.NDArray[numpy.uint8]]"),
           "Rows in token order, as one uint8 [tokens, row_bytes] view per contiguous run of host rows.")
      .def(
          "index_keys",
          [](nb::object self, std::int64_t layer) {
            auto& kv = nb::cast<KvRuns&>(self);
            std::vector<std::byte>& keys = kv.index_keys[checked_layer(kv, layer)];
            const auto block = static_cast<std::size_t>(kv.index_block_bytes);
            const std::size_t shape[] = {keys.size() / block, block};
            return nb::cast(Bytes(keys.data(), 2, shape, self));
          },
          "layer"_a, nb::sig("def index_keys(self, layer: int) -> numpy.typing.NDArray[numpy.uint8]"),
          "Index keys, uint8 [blocks of 64 tokens, index_block_bytes]: 64 keys, then (fp8) 64 float32 scales.")
      .def_static("from_arrays", &from_arrays, "rows"_a, "index_keys"_a,
                  "KV that lies in arrays: per layer uint8 [tokens, row_bytes] and uint8 [blocks, "
                  "index_block_bytes].\n\nRaises:\n    InvalidArgument: naming the argument.");
}

}  // namespace echo::python
