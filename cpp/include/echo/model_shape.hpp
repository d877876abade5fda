#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "echo/export.hpp"

namespace echo {

/// Tokens per block: the unit in which host rows and index keys are given out.
inline constexpr std::int32_t kBlockTokens = 64;

/// Elements of an FP8 row that share a scale.
inline constexpr std::int32_t kFp8Group = 128;

/// Of a row in the format fp8_656: all bytes, and codes, which come first.
inline constexpr std::int32_t kFp8RowBytes = 656;
inline constexpr std::int32_t kFp8RowCodes = 512;

/// Blocks that hold so many tokens.
constexpr std::int64_t blocks_of(std::int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

/// How one KV row (latent + rope of one token and layer) is stored.
///   fp8_656    512 x e4m3 | 4 x fp32 scale, one per 128 | 64 x bf16 rope; scales are powers of two, so
///              that dequantisation to bf16 is exact (656 B; layout of DeepSeek's FlashMLA)
///   bf16_1152  576 x bf16 (1152 B)
///   fp32       (latent + rope) x fp32, for exact comparisons with other implementations
///   raw        `row_bytes` bytes that only their writer understands: append and recall work,
///              attend is refused
enum class RowFormat : std::uint8_t { fp8_656, bf16_1152, fp32, raw };

/// How the indexer's keys are stored, in blocks of 64 tokens.
///   fp8   64 x index_dim e4m3 bytes, then 64 fp32 scales (powers of two); queries are quantised alike
///   fp32  64 x index_dim floats
enum class IndexKeyFormat : std::uint8_t { fp8, fp32 };

ECHO_API std::string_view to_string(RowFormat format);
ECHO_API std::string_view to_string(IndexKeyFormat format);
/// Throws InvalidArgument naming `row_format` and the known names.
ECHO_API RowFormat row_format_from(std::string_view name);
ECHO_API IndexKeyFormat index_key_format_from(std::string_view name);

/// The sizes of a model with DeepSeek sparse attention (DSA), as far as its KV cache is concerned.
struct ECHO_API ModelShape {
  std::int32_t layers = 61;
  std::int32_t index_heads = 64;   ///< heads of the indexer, a multiple of 8
  std::int32_t index_dim = 128;    ///< dimension of index keys and queries, a multiple of 16
  std::int32_t query_heads = 128;  ///< attention heads
  std::int32_t latent_dim = 512;   ///< compressed KV per token (MLA); also the value
  std::int32_t rope_dim = 64;      ///< shared rotary part of the key
  std::int32_t top_k = 2048;       ///< tokens each query attends to
  RowFormat row_format = RowFormat::fp8_656;
  IndexKeyFormat index_key_format = IndexKeyFormat::fp8;
  std::int32_t raw_row_bytes = 0;  ///< bytes of a row when row_format is raw, a multiple of 16

  /// DeepSeek-V3.2: 61 layers, 64 index heads, 128 query heads, top-k 2048.
  static ModelShape deepseek_v32(RowFormat format = RowFormat::fp8_656);
  /// GLM-5: 78 layers, 32 index heads, 64 query heads, top-k 2048.
  static ModelShape glm_5(RowFormat format = RowFormat::fp8_656);
  /// Two layers, 8 index heads, 16 query heads, top-k 64: for tests and demonstrations.
  static ModelShape tiny(RowFormat format = RowFormat::fp32);

  /// Bytes of one KV row; the one source of truth.
  std::int32_t row_bytes() const;
  /// Elements of one KV row as the model hands it over: latent_dim + rope_dim.
  std::int32_t row_dim() const { return latent_dim + rope_dim; }
  /// Bytes of the index keys of one block of 64 tokens.
  std::int64_t index_block_bytes() const;
  /// Throws InvalidArgument naming the field.
  void validate() const;
};

}  // namespace echo
