#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "echo/export.hpp"
#include "echo/model_shape.hpp"
#include "echo/runtime_config.hpp"

namespace echo {

/// Memory of a machine that a runtime may use, in bytes; 0 means unknown and is not checked.
struct MachineLimits {
  std::int64_t device_bytes = 0;
  std::int64_t host_bytes = 0;
};

enum class MemoryPlace : std::uint8_t { device, host };

/// One kind of allocation: `count` pieces of `bytes` each.
struct MemoryItem {
  std::string name;
  MemoryPlace place;
  std::int64_t bytes;
  std::int64_t count;
  std::string formula;  ///< how the bytes come about, for people
  std::int64_t total() const { return bytes * count; }
};

/// All sizes of a runtime, computed before any memory is touched. The runtime allocates from this list, so
/// what the plan shows is what is taken.
struct ECHO_API Plan {
  ModelShape shape;
  RuntimeConfig config;  ///< with automatic values filled in
  MachineLimits limits;
  std::int64_t host_blocks = 0;      ///< blocks of 64 tokens
  std::int64_t minimum_slots = 0;    ///< max_batch x query_rows x (top_k + 1)
  std::int64_t host_row_stride = 0;  ///< bytes
  std::int64_t pass_rows = 0;        ///< most query rows of a pass: a step's or a prefill chunk's
  std::int64_t block_rows = 0;       ///< most query rows scored and recalled together
  std::int64_t sift_capacity = 0;    ///< candidates that score lists for each row of a step; 0: it does not sift
  std::vector<MemoryItem> items;

  std::int64_t total(MemoryPlace place) const;
  /// Bytes of one piece of the named item.
  std::int64_t bytes_of(std::string_view name) const;
  /// Whether it fits the limits.
  bool fits() const;
  /// Sessions of `tokens` tokens (prompt and output) that fit the host pool at once.
  std::int64_t sessions_of(std::int64_t tokens) const;
  /// What was asked and what there is, as a table for people.
  std::string table() const;
};

/// Checks shape and config (InvalidArgument naming the field) and computes all sizes. Does not check the
/// limits: see Plan::fits.
ECHO_API Plan make_plan(const ModelShape& shape, const RuntimeConfig& config, const MachineLimits& limits = {});

/// What the named device ("cpu", "cuda", "cuda:1", "auto") offers now.
ECHO_API MachineLimits machine_limits(const std::string& device);

}  // namespace echo
