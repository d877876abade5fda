#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "echo/export.hpp"

namespace echo {

/// Everything a Runtime can be told, all of it fixed at construction. Each field is at the same time a
/// keyword argument in Python, an environment variable ECHO_<NAME> and a flag --<name> of `echo-kv`; its
/// documentation stands once, in config_fields().
struct ECHO_API RuntimeConfig {
  std::string device = "auto";
  std::string kernels = "auto";
  std::int64_t host_tokens = 65536;
  std::int64_t gpu_slots = 0;
  std::int64_t max_batch = 8;
  std::int64_t query_rows = 1;
  std::int64_t max_sessions = 64;
  std::int64_t max_context = 16384;
  std::int64_t prefill_chunk = 512;
  std::int64_t host_row_stride = 0;
  std::int64_t attention_splits = 0;
  double threshold_alpha = 0.5;
  std::string prefetch = "on";
  double prefetch_cap = -1.0;
  std::int64_t forecast_cap = 0;
  std::int64_t threads = 0;

  /// Fields from ECHO_* variables where set, defaults elsewhere. Throws InvalidArgument naming the variable.
  static RuntimeConfig from_env();
  /// Sets one field from text, as variables and flags do. Throws InvalidArgument naming the field.
  void set(std::string_view field, std::string_view text);
};

using ConfigMember = std::variant<std::string RuntimeConfig::*, std::int64_t RuntimeConfig::*, double RuntimeConfig::*>;

struct ConfigField {
  std::string_view name;
  std::string_view unit;
  std::string_view doc;
  ConfigMember member;
  std::string_view choices = {};  ///< of text, as messages list them: "on or off"; empty for numbers
};

/// The fields of RuntimeConfig in order.
ECHO_API std::span<const ConfigField> config_fields();

}  // namespace echo
