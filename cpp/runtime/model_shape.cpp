#include "echo/model_shape.hpp"

#include <array>
#include <utility>

#include "echo/errors.hpp"

namespace echo {
namespace {

constexpr std::array<std::pair<RowFormat, std::string_view>, 4> kRowFormats{{
    {RowFormat::fp8_656, "fp8_656"},
    {RowFormat::bf16_1152, "bf16_1152"},
    {RowFormat::fp32, "fp32"},
    {RowFormat::raw, "raw"},
}};
constexpr std::array<std::pair<IndexKeyFormat, std::string_view>, 2> kIndexKeyFormats{{
    {IndexKeyFormat::fp8, "fp8"},
    {IndexKeyFormat::fp32, "fp32"},
}};

template <typename Table, typename Format>
std::string_view name_of(const Table& table, Format format) {
  for (const auto& [known, name] : table) {
    if (known == format) {
      return name;
    }
  }
  return "?";
}

template <typename Table>
auto format_of(const Table& table, std::string_view name, const char* argument) {
  std::string known_names;
  for (const auto& [known, known_name] : table) {
    if (known_name == name) {
      return known;
    }
    known_names += (known_names.empty() ? "" : ", ") + std::string(known_name);
  }
  throw InvalidArgument(std::string(argument) + ": '" + std::string(name) + "' is unknown, expected one of " +
                        known_names);
}

void require(bool holds, const char* field, std::int64_t value, const char* expected) {
  if (!holds) {
    throw InvalidArgument(std::string(field) + ": " + std::to_string(value) + " given, expected " + expected);
  }
}

}  // namespace

std::string_view to_string(RowFormat format) { return name_of(kRowFormats, format); }
std::string_view to_string(IndexKeyFormat format) { return name_of(kIndexKeyFormats, format); }
RowFormat row_format_from(std::string_view name) { return format_of(kRowFormats, name, "row_format"); }
IndexKeyFormat index_key_format_from(std::string_view name) {
  return format_of(kIndexKeyFormats, name, "index_key_format");
}

ModelShape ModelShape::deepseek_v32(RowFormat format) {
  ModelShape shape;
  shape.row_format = format;
  return shape;
}

ModelShape ModelShape::glm_5(RowFormat format) {
  ModelShape shape;
  shape.layers = 78;
  shape.index_heads = 32;
  shape.query_heads = 64;
  shape.row_format = format;
  return shape;
}

ModelShape ModelShape::tiny(RowFormat format) {
  ModelShape shape;
  shape.layers = 2;
  shape.index_heads = 8;
  shape.query_heads = 16;
  shape.top_k = 64;
  shape.row_format = format;
  shape.index_key_format = format == RowFormat::fp32 ? IndexKeyFormat::fp32 : IndexKeyFormat::fp8;
  return shape;
}

std::int32_t ModelShape::row_bytes() const {
  switch (row_format) {
    case RowFormat::fp8_656:
      return latent_dim + latent_dim / kFp8Group * 4 + rope_dim * 2;
    case RowFormat::bf16_1152:
      return row_dim() * 2;
    case RowFormat::fp32:
      return row_dim() * 4;
    case RowFormat::raw:
      return raw_row_bytes;
  }
  return 0;
}

std::int64_t ModelShape::index_block_bytes() const {
  const std::int64_t elements = static_cast<std::int64_t>(kBlockTokens) * index_dim;
  return index_key_format == IndexKeyFormat::fp8 ? elements + kBlockTokens * 4 : elements * 4;
}

void ModelShape::validate() const {
  // The upper ends are far above any model and keep every product of sizes within 64 bits (planner.cpp).
  const auto require_between = [](const char* field, std::int32_t value, std::int32_t least, std::int32_t most) {
    require(value >= least && value <= most, field, value,
            (std::to_string(least) + " to " + std::to_string(most)).c_str());
  };
  const auto require_multiple = [](const char* field, std::int32_t value, std::int32_t unit, std::int32_t most) {
    require(value >= unit && value <= most && value % unit == 0, field, value,
            ("a multiple of " + std::to_string(unit) + ", at most " + std::to_string(most)).c_str());
  };
  require_between("layers", layers, 1, 1024);
  require_multiple("index_heads", index_heads, 8, 1024);
  require_multiple("index_dim", index_dim, 16, 4096);
  require_between("query_heads", query_heads, 1, 4096);
  require_between("top_k", top_k, 1, 1 << 20);
  if (row_format == RowFormat::raw) {
    require_multiple("raw_row_bytes", raw_row_bytes, 16, 1 << 20);
    return;
  }
  require(raw_row_bytes == 0, "raw_row_bytes", raw_row_bytes, "0 unless row_format is raw");
  if (row_format == RowFormat::fp32) {
    require_multiple("latent_dim", latent_dim, 16, 65536);
    if (rope_dim != 0) {
      require_multiple("rope_dim", rope_dim, 16, 65536);
    }
  } else {
    require(latent_dim == 512, "latent_dim", latent_dim, "512 for this row_format");
    require(rope_dim == 64, "rope_dim", rope_dim, "64 for this row_format");
  }
}

}  // namespace echo
