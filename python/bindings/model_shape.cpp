#include "echo/model_shape.hpp"

#include <nanobind/stl/string.h>

#include <string>

#include "bindings.hpp"
#include "integers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace echo::python {
namespace {
using Size = Integer<std::int32_t>;
}  // namespace

void register_model_shape(nb::module_& module) {
  const ModelShape defaults;
  nb::class_<ModelShape>(module, "ModelShape",
                         "Sizes of a model with DeepSeek sparse attention, as far as its KV cache is concerned.\n\n"
                         "Row formats: `fp8_656` (512 x e4m3, 4 scales, 64 x bf16), `bf16_1152`, `fp32` (exact "
                         "comparisons), `raw` (`raw_row_bytes` bytes that only their writer understands).\n"
                         "Index key formats: `fp8` (e4m3 and one scale per token), `fp32`.\n\n"
                         "Raises:\n    InvalidArgument: naming the field.")
      .def(
          "__init__",
          [](ModelShape* self, const Size& layers, const Size& index_heads, const Size& index_dim,
             const Size& query_heads, const Size& latent_dim, const Size& rope_dim, const Size& top_k,
             const std::string& row_format, const std::string& index_key_format, const Size& raw_row_bytes) {
            ModelShape shape{.layers = integer("layers", layers),
                             .index_heads = integer("index_heads", index_heads),
                             .index_dim = integer("index_dim", index_dim),
                             .query_heads = integer("query_heads", query_heads),
                             .latent_dim = integer("latent_dim", latent_dim),
                             .rope_dim = integer("rope_dim", rope_dim),
                             .top_k = integer("top_k", top_k),
                             .row_format = row_format_from(row_format),
                             .index_key_format = index_key_format_from(index_key_format),
                             .raw_row_bytes = integer("raw_row_bytes", raw_row_bytes)};
            shape.validate();
            new (self) ModelShape(shape);
          },
          nb::kw_only(), "layers"_a = defaults.layers, "index_heads"_a = defaults.index_heads,
          "index_dim"_a = defaults.index_dim, "query_heads"_a = defaults.query_heads,
          "latent_dim"_a = defaults.latent_dim, "rope_dim"_a = defaults.rope_dim, "top_k"_a = defaults.top_k,
          "row_format"_a = "fp8_656", "index_key_format"_a = "fp8", "raw_row_bytes"_a = 0)
      .def_static(
          "deepseek_v32", [](const std::string& format) { return ModelShape::deepseek_v32(row_format_from(format)); },
          "row_format"_a = "fp8_656", "DeepSeek-V3.2: 61 layers, 64 index heads, 128 query heads, top-k 2048.")
      .def_static(
          "glm_5", [](const std::string& format) { return ModelShape::glm_5(row_format_from(format)); },
          "row_format"_a = "fp8_656", "GLM-5: 78 layers, 32 index heads, 64 query heads, top-k 2048.")
      .def_static(
          "tiny", [](const std::string& format) { return ModelShape::tiny(row_format_from(format)); },
          "row_format"_a = "fp32", "Two layers, 8 index heads, 16 query heads, top-k 64, for tests.")
      .def_ro("layers", &ModelShape::layers)
      .def_ro("index_heads", &ModelShape::index_heads)
      .def_ro("index_dim", &ModelShape::index_dim)
      .def_ro("query_heads", &ModelShape::query_heads)
      .def_ro("latent_dim", &ModelShape::latent_dim)
      .def_ro("rope_dim", &ModelShape::rope_dim)
      .def_ro("top_k", &ModelShape::top_k)
      .def_prop_ro("row_format", [](const ModelShape& s) { return std::string(to_string(s.row_format)); })
      .def_prop_ro("index_key_format", [](const ModelShape& s) { return std::string(to_string(s.index_key_format)); })
      .def_prop_ro("row_bytes", &ModelShape::row_bytes, "Bytes of one KV row of one layer.")
      .def_prop_ro("row_dim", &ModelShape::row_dim, "Elements of one KV row: latent_dim + rope_dim.")
      .def_prop_ro("index_block_bytes", &ModelShape::index_block_bytes, "Bytes of the index keys of 64 tokens.")
      .def("__repr__", [](const ModelShape& s) {
        return "ModelShape(layers=" + std::to_string(s.layers) + ", index_heads=" + std::to_string(s.index_heads) +
               ", index_dim=" + std::to_string(s.index_dim) + ", query_heads=" + std::to_string(s.query_heads) +
               ", latent_dim=" + std::to_string(s.latent_dim) + ", rope_dim=" + std::to_string(s.rope_dim) +
               ", top_k=" + std::to_string(s.top_k) + ", row_format='" + std::string(to_string(s.row_format)) +
               "', index_key_format='" + std::string(to_string(s.index_key_format)) + "')";
      });
}

}  // namespace echo::python
