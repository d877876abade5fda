#include "forward_pass.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "array_cast.hpp"
#include "bindings.hpp"
#include "echo/errors.hpp"
#include "integers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {
namespace {

using Block = std::optional<std::pair<std::int32_t, std::int32_t>>;
using Layer = Integer<std::int32_t>;

/// The block that is meant where none is named: the only one.
RowBlock block_of(const ForwardPass& pass, const Block& block) {
  if (block) {
    return {.first = block->first, .count = block->second};
  }
  if (pass.blocks().size() != 1) {
    throw InvalidArgument("block: this pass has " + std::to_string(pass.blocks().size()) +
                          " blocks, name one of ForwardPass.blocks");
  }
  return pass.blocks().front();
}

/// All that are missing at once: they are keywords, and a call that lacks one often lacks several.
void require(std::initializer_list<std::pair<const char*, bool>> arguments) {
  std::string missing;
  for (const auto& [name, is_given] : arguments) {
    if (!is_given) {
      missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
  }
  if (!missing.empty()) {
    throw InvalidArgument(missing + ": not given, attention needs kv, q, scale and out");
  }
}

HeldArray given(nb::handle object, const char* name, const std::string& device, bool output = false) {
  HeldArray array = to_array(object, name, device, output);
  if (!array) {
    throw InvalidArgument(std::string(name) + ": None given, expected an array");
  }
  return array;
}

nb::object out_array(const PassHandle& self, const Array& array) {
  return to_python(array, self.device(), self.get().keep_alive());
}

void append(const PassHandle& self, const Layer& layer, nb::handle kv, nb::handle index_key) {
  const std::int32_t number = integer("layer", layer);
  const HeldArray rows = given(kv, "kv", self.device());
  const HeldArray keys = to_array(index_key, "index_key", self.device());
  const nb::gil_scoped_release release;
  self.get().append(number, rows.array, keys.array);
}

void score(const PassHandle& self, const Layer& layer, nb::handle index_q, nb::handle index_weights,
           const Block& block) {
  const std::int32_t number = integer("layer", layer);
  const HeldArray q = given(index_q, "index_q", self.device());
  const HeldArray weights = given(index_weights, "index_weights", self.device());
  const RowBlock rows = block_of(self.get(), block);
  const nb::gil_scoped_release release;
  self.get().score(number, q.array, weights.array, rows);
}

nb::object scores(const PassHandle& self, const Block& block) {
  return out_array(self, self.get().scores(block_of(self.get(), block)));
}

nb::object select(const PassHandle& self, const Layer& layer, const Block& block) {
  const std::int32_t number = integer("layer", layer);
  const RowBlock rows = block_of(self.get(), block);
  Array selection;
  {
    const nb::gil_scoped_release release;
    selection = self.get().select(number, rows);
  }
  return out_array(self, selection);
}

nb::object recall(const PassHandle& self, const Layer& layer, nb::handle selection, const Block& block) {
  const std::int32_t number = integer("layer", layer);
  const HeldArray positions = to_array(selection, "selection", self.device());
  const RowBlock rows = block_of(self.get(), block);
  Array slots;
  {
    const nb::gil_scoped_release release;
    slots = self.get().recall(number, rows, positions.array);
  }
  return out_array(self, slots);
}

void attend(const PassHandle& self, const Layer& layer, nb::handle q, float scale, nb::handle out, const Block& block) {
  const std::int32_t number = integer("layer", layer);
  const HeldArray queries = given(q, "q", self.device());
  const HeldArray output = given(out, "out", self.device(), true);
  const RowBlock rows = block_of(self.get(), block);
  const nb::gil_scoped_release release;
  self.get().attend(number, queries.array, scale, output.array, rows);
}

void attention(const PassHandle& self, const Layer& layer, nb::handle kv, nb::handle q, std::optional<float> scale,
               nb::handle out, nb::handle index_key, nb::handle index_q, nb::handle index_weights) {
  const std::int32_t number = integer("layer", layer);
  require({{"kv", !kv.is_none()}, {"q", !q.is_none()}, {"scale", scale.has_value()}, {"out", !out.is_none()}});
  const HeldArray rows = given(kv, "kv", self.device());
  const HeldArray keys = to_array(index_key, "index_key", self.device());
  const HeldArray index_queries = to_array(index_q, "index_q", self.device());
  const HeldArray weights = to_array(index_weights, "index_weights", self.device());
  const HeldArray queries = given(q, "q", self.device());
  const HeldArray output = given(out, "out", self.device(), true);
  const LayerInputs in{.kv = rows.array,
                       .index_key = keys.array,
                       .index_q = index_queries.array,
                       .index_weights = weights.array,
                       .q = queries.array,
                       .scale = *scale};
  const nb::gil_scoped_release release;
  self.get().attention(number, in, output.array);
}

}  // namespace

ForwardPass& PassHandle::get() const {
  if (pass_ == nullptr) {
    throw StateError("pass: a ForwardPass can only be used by the forward it was given to, while it runs");
  }
  return *pass_;
}

Forward to_forward(nb::object callable, const std::string& device) {
  if (callable.is_none()) {
    return {};
  }
  if (PyCallable_Check(callable.ptr()) == 0) {
    throw InvalidArgument("forward: " + std::string(nb::repr(callable).c_str()) + " given, expected a callable");
  }
  const std::shared_ptr<PyObject> held(callable.release().ptr(), [](PyObject* object) {
    const nb::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  return [held, device](ForwardPass& pass) {
    const nb::gil_scoped_acquire gil;
    const nb::object handle = nb::cast(PassHandle(pass, device));
    try {
      nb::handle(held.get())(handle);
    } catch (...) {
      nb::cast<PassHandle&>(handle).end();
      throw;
    }
    nb::cast<PassHandle&>(handle).end();
  };
}

void register_forward_pass(nb::module_& module) {
  nb::class_<PassHandle>(
      module, "ForwardPass",
      "One run of a model over a batch (decode) or over a chunk of one session (prefill).\n\n"
      "A forward gets it and calls the verbs for layer 0, 1, ... in order, or `attention`, which is all of them.\n"
      "Row r belongs to session r // query_rows of the batch. Padding rows have position -1; what they contain\n"
      "changes nothing. Arrays are anything with DLPack on the runtime's device: contiguous float32 or bfloat16\n"
      "unless said otherwise, never converted.")
      .def_prop_ro(
          "rows", [](const PassHandle& p) { return p.get().rows(); }, "Query rows, padding included.")
      .def_prop_ro(
          "query_rows", [](const PassHandle& p) { return p.get().query_rows(); }, "New tokens per session.")
      .def_prop_ro("is_prefill", [](const PassHandle& p) { return p.get().is_prefill(); })
      .def_prop_ro("device", &PassHandle::device)
      .def_prop_ro(
          "tokens", [](const PassHandle& p) { return out_array(p, p.get().tokens()); },
          "int32 [rows] token ids, 0 on padding rows.")
      .def_prop_ro(
          "positions", [](const PassHandle& p) { return out_array(p, p.get().positions()); },
          "int32 [rows] position of each row's token in its session, -1 on padding rows.")
      .def_prop_ro(
          "selection", [](const PassHandle& p) { return out_array(p, p.get().selection()); },
          "int32 [rows, top_k] selections of the last layer that had its own; valid until the next select.")
      .def_prop_ro(
          "blocks",
          [](const PassHandle& p) {
            std::vector<std::pair<std::int32_t, std::int32_t>> blocks;
            for (const RowBlock& block : p.get().blocks()) {
              blocks.emplace_back(block.first, block.count);
            }
            return blocks;
          },
          "(first row, rows) of the blocks the pass is worked through in; one for a decode step.")
      .def("append", &append, "layer"_a, "kv"_a.none(), "index_key"_a = nb::none(),
           "Writes rows and index keys of the new tokens.\n\n"
           "Args:\n    layer: layer of the model.\n    kv: [rows, latent_dim + rope_dim], or uint8 [rows, row_bytes] "
           "already encoded.\n    index_key: [rows, index_dim], or None where the layer has no indexer.")
      .def("score", &score, "layer"_a, "index_q"_a.none(), "index_weights"_a.none(), "block"_a = nb::none(),
           "Index scores of all cached tokens up to each row's own (DeepSeek-V3.2, eq. 1).\n\n"
           "Args:\n    layer: layer of the model.\n    index_q: [rows, index_heads, index_dim], of the whole pass.\n"
           "    index_weights: float32 [rows, index_heads], constant factors folded in.\n"
           "    block: one of `blocks`; may be left out if there is only one.")
      .def("scores", &scores, "block"_a = nb::none(),
           "What the last score, which has to be of this block, left: float32 [rows of the block, max_context].\n\n"
           "Of a row at position p columns 0 to p hold scores and what lies behind anything, of a padding row all.\n"
           "Valid until the next score; also after `attention`, for the last of its blocks.\n\n"
           "Args:\n    block: one of `blocks`; may be left out if there is only one.\n\n"
           "Raises:\n    InvalidArgument: `block` is none of `blocks`, or left out where there are several.\n"
           "    StateError: `block` was not scored last, or nothing was in this pass.")
      .def("select", &select, "layer"_a, "block"_a = nb::none(),
           "The exact top-k of the last score: int32 [rows of the block, top_k], ascending positions, then -1.\n\n"
           "Ties go to the smaller position; NaN ranks below -inf. Valid until the next select of these rows.")
      .def("recall", &recall, "layer"_a, "selection"_a = nb::none(), "block"_a = nb::none(),
           "Makes the selected rows resident: int32 [rows of the block, top_k] slots, -1 where nothing is selected.\n\n"
           "Args:\n    layer: layer of the model.\n    selection: int32 [rows of the block, top_k] positions, -1 "
           "anywhere; default the last select's.\n    block: one of `blocks`.")
      .def("attend", &attend, "layer"_a, "q"_a.none(), "scale"_a, "out"_a.none(), "block"_a = nb::none(),
           "Sparse MLA over the rows of the last recall.\n\n"
           "Args:\n    layer: layer of the model.\n    q: [rows, query_heads, latent_dim + rope_dim], of the whole "
           "pass.\n    scale: softmax scale.\n    out: written, [rows, query_heads, latent_dim], of the whole pass.\n"
           "    block: one of `blocks`.")
      .def("attention", &attention, "layer"_a, nb::kw_only(), "kv"_a = nb::none(), "q"_a = nb::none(),
           "scale"_a = nb::none(), "out"_a = nb::none(), "index_key"_a = nb::none(), "index_q"_a = nb::none(),
           "index_weights"_a = nb::none(),
           nb::sig("def attention(self, layer: int, *, kv: object, q: object, scale: float, out: object, "
                   "index_key: object | None = None, index_q: object | None = None, "
                   "index_weights: object | None = None) -> None"),
           "The whole layer: append, then score, select, recall and attend for each block.\n\n"
           "While decoding, score writes the index keys and recall the rows: there is no launch for append.\n"
           "Without index_key, index_q and index_weights the layer attends to the selection of the last layer that "
           "had one.\n\n"
           "Args:\n    layer: layer of the model.\n    kv: [rows, latent_dim + rope_dim], or uint8 [rows, row_bytes] "
           "already encoded.\n    q: [rows, query_heads, latent_dim + rope_dim]; like out and index_q at a multiple "
           "of 16 bytes on a Hopper GPU.\n"
           "    scale: softmax scale.\n"
           "    out: written, [rows, query_heads, latent_dim].\n    index_key: [rows, index_dim].\n"
           "    index_q: [rows, index_heads, index_dim].\n"
           "    index_weights: float32 [rows, index_heads], constant factors folded in.\n\n"
           "Raises:\n    InvalidArgument: naming the argument; `index_q` also if some of the last three are missing.\n"
           "    NotSupported: rows are raw.\n"
           "    StateError: `layer` was appended to already, or nothing was selected before in this pass.");
}

}  // namespace echo::python
