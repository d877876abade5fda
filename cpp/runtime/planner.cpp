#include "echo/planner.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "cache_manager/layer_view.hpp"
#include "echo/errors.hpp"
#include "runtime/attention_splits.hpp"
#include "runtime/backends.hpp"
#include "runtime/control_block.hpp"

namespace echo {
namespace {

constexpr std::int64_t kMaxRowStride = 1 << 20;
constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
/// Tokens of a session: kernels count some thousands beyond the last, in 32 bits.
constexpr std::int64_t kMostContext = std::int64_t{1} << 30;
/// Candidates that are listed for each row, per selected one: as many again may be listed in vain.
constexpr std::int64_t kCandidatesPerSelected = 3;
constexpr std::int64_t kLeastCandidates = 1024;  // for small top_k margins are larger
constexpr std::int64_t kCandidateGrain = 64;
/// Prefill works in blocks of up to this many query rows: enough to amortise decoding the index keys.
constexpr std::int64_t kPrefillBlockRows = 64;

void require(bool holds, const char* field, std::int64_t value, const std::string& expected) {
  if (!holds) {
    throw InvalidArgument(std::string(field) + ": " + std::to_string(value) + " given, expected " + expected);
  }
}

void require_range(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  require(value >= least && value <= most, field, value, std::to_string(least) + " to " + std::to_string(most));
}

/// The text of a setting that is on or off.
bool is_on(const char* field, const std::string& text) {
  if (text != "on" && text != "off") {
    throw InvalidArgument(std::string(field) + ": '" + text + "' given, expected on or off");
  }
  return text == "on";
}

std::string bytes_text(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024.0 && unit < 4) {
    value /= 1024.0;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

std::string product(std::int64_t a, const char* what_a, std::int64_t b, const std::string& what_b) {
  return std::to_string(a) + " " + what_a + " x " + std::to_string(b) + " " + what_b;
}

/// Rows for each session and layer. On a CPU there is no link that would be idle; generic kernels have no forecasts.
std::int64_t usual_forecasts(const ModelShape& shape, const RuntimeConfig& config) {
  const bool own_kernels = config.device.starts_with("cuda") && wants_own_kernels(config);
  return own_kernels ? std::max<std::int64_t>(1, shape.top_k / 10) : 0;
}

}  // namespace

ScratchSizes scratch_sizes(const Plan& plan) {
  return {.shape = shape_view(plan.shape),
          .layers = plan.shape.layers,
          .rows = static_cast<std::int32_t>(plan.pass_rows),
          .block_rows = static_cast<std::int32_t>(plan.block_rows),
          .slots = static_cast<std::int32_t>(plan.config.gpu_slots),
          .host_rows = plan.config.host_tokens,
          .splits = static_cast<std::int32_t>(plan.config.attention_splits),
          .entries = static_cast<std::int32_t>(plan.config.max_batch),
          .forecast_cap = static_cast<std::int32_t>(plan.config.forecast_cap)};
}

Plan make_plan(const ModelShape& shape, const RuntimeConfig& config, const MachineLimits& limits) {
  shape.validate();
  // Rows, slots and row x top_k products are 32-bit indices on the device; bytes are 64-bit everywhere.
  require_range("host_tokens", config.host_tokens, 1, kMaxInt32 / kBlockTokens * kBlockTokens);
  require_range("max_batch", config.max_batch, 1, 65535);
  require_range("query_rows", config.query_rows, 1, 64);
  require_range("max_sessions", config.max_sessions, 1, 1 << 20);
  require_range("max_context", config.max_context, 1, kMostContext);
  require_range("prefill_chunk", config.prefill_chunk, 1, 65536);
  require_range("attention_splits", config.attention_splits, 0, 64);
  require_range("threads", config.threads, 0, 4096);
  require_device_name(config.device);
  static_cast<void>(wants_own_kernels(config));
  if (!(config.threshold_alpha >= 0.0 && config.threshold_alpha <= 1.0)) {
    throw InvalidArgument("threshold_alpha: " + std::to_string(config.threshold_alpha) + " given, expected 0 to 1");
  }
  if (!(config.prefetch_cap == -1.0 || (config.prefetch_cap >= 0.0 && config.prefetch_cap <= 1000.0))) {
    throw InvalidArgument("prefetch_cap: " + std::to_string(config.prefetch_cap) + " given, expected 0 to 1000, or -1");
  }
  require_range("forecast_cap", config.forecast_cap, -1, 65536);
  const bool sifts = is_on("prefetch", config.prefetch);

  Plan plan;
  plan.shape = shape;
  plan.config = config;
  plan.limits = limits;
  plan.host_blocks = blocks_of(config.host_tokens);
  plan.config.forecast_cap =
      std::min<std::int64_t>(config.forecast_cap == -1 ? usual_forecasts(shape, config) : config.forecast_cap,
                             forecast_reach(static_cast<std::int32_t>(shape.top_k)));
  plan.config.host_tokens = plan.host_blocks * kBlockTokens;
  // Whole blocks: kernels read a row's scores 16 bytes at a time.
  plan.config.max_context = std::min(blocks_of(config.max_context) * kBlockTokens, plan.config.host_tokens);
  plan.host_row_stride = config.host_row_stride == 0 ? shape.row_bytes() : config.host_row_stride;
  plan.config.host_row_stride = plan.host_row_stride;
  require(plan.host_row_stride >= shape.row_bytes() && plan.host_row_stride % 16 == 0 &&
              plan.host_row_stride <= kMaxRowStride,
          "host_row_stride", config.host_row_stride,
          "a multiple of 16, " + std::to_string(shape.row_bytes()) + " to " + std::to_string(kMaxRowStride));

  const std::int64_t step_rows = config.max_batch * config.query_rows;
  plan.config.attention_splits =
      config.attention_splits == 0 ? chosen_attention_splits(shape, step_rows) : config.attention_splits;
  plan.minimum_slots = step_rows * (shape.top_k + 1);
  plan.config.gpu_slots = config.gpu_slots == 0 ? plan.minimum_slots : config.gpu_slots;
  require(plan.config.gpu_slots >= plan.minimum_slots && plan.config.gpu_slots < kMaxInt32, "gpu_slots",
          config.gpu_slots, "at least max_batch x query_rows x (top_k + 1) = " + std::to_string(plan.minimum_slots));
  const std::int64_t slots = plan.config.gpu_slots;
  plan.block_rows = std::max(step_rows, std::min({kPrefillBlockRows, config.prefill_chunk, slots / (shape.top_k + 1)}));
  plan.pass_rows = std::max(step_rows, config.prefill_chunk);
  require(plan.pass_rows * shape.top_k <= kMaxInt32, "prefill_chunk", config.prefill_chunk,
          "at most " + std::to_string(kMaxInt32 / shape.top_k) + " with top_k = " + std::to_string(shape.top_k));

  if (sifts) {
    const std::int64_t wanted = std::max(kLeastCandidates, kCandidatesPerSelected * shape.top_k);
    plan.sift_capacity = (wanted + kCandidateGrain - 1) / kCandidateGrain * kCandidateGrain;
  }

  const std::int64_t rows = plan.config.host_tokens;
  const std::int64_t layers = shape.layers;
  const auto device = [&](const char* name, std::int64_t bytes, std::int64_t count, std::string formula) {
    plan.items.push_back({name, MemoryPlace::device, bytes, count, std::move(formula)});
  };
  plan.items.push_back({"host_pool", MemoryPlace::host, layers * rows * plan.host_row_stride, 1,
                        product(layers * rows, "rows", plan.host_row_stride, "B")});
  device("slots", slots * shape.row_bytes(), layers, product(slots, "slots", shape.row_bytes(), "B"));
  device("index_keys", plan.host_blocks * shape.index_block_bytes(), layers,
         product(plan.host_blocks, "blocks", shape.index_block_bytes(), "B"));
  device("slot_of", rows * 4, layers, product(rows, "host rows", 4, "B"));
  device("host_of", slots * 4, layers, product(slots, "slots", 4, "B"));
  device("stamp", slots * 4, layers, product(slots, "slots", 4, "B"));
  device("free_slots", slots * 4, layers, product(slots, "slots", 4, "B"));
  device("replacement", static_cast<std::int64_t>(sizeof(ReplacementState)) * layers, 1,
         "hands, free slots, latest misses and pops, copies");
  device("counters", static_cast<std::int64_t>(sizeof(LayerCounters)) * layers, 1,
         "hits, misses, evictions, appended, candidates, prefetches");
  device("scores", plan.block_rows * plan.config.max_context * 4, 1,
         product(plan.block_rows, "query rows", plan.config.max_context, "tokens x 4 B"));
  device("selection", plan.pass_rows * shape.top_k * 4, 1, product(plan.pass_rows, "rows", shape.top_k, "x 4 B"));
  device("selected_slots", plan.block_rows * shape.top_k * 4, 1,
         product(plan.block_rows, "rows", shape.top_k, "x 4 B"));
  device("kth_score", layers * plan.pass_rows * 4, 1, product(layers, "layers", plan.pass_rows, "rows x 4 B"));
  device("thresholds", config.max_sessions * layers * 4, 1,
         product(config.max_sessions, "sessions", layers, "layers x 4 B"));
  device("deviations", config.max_sessions * layers * 4, 1,
         product(config.max_sessions, "sessions", layers, "layers x 4 B"));
  if (sifts) {
    // Twice: a score finds its own zeroed, since the score before it zeroed them.
    const std::int64_t both = 2 * step_rows;
    device("sift_rows", both * static_cast<std::int64_t>(sizeof(RowSift)), 1,
           product(both, "rows of counts and bounds", sizeof(RowSift), "B"));
    device("prefetched", 2 * static_cast<std::int64_t>(sizeof(std::int32_t)), 1, "rows prefetched by a call");
    device("candidates", step_rows * plan.sift_capacity * static_cast<std::int64_t>(sizeof(ScoredToken)), 1,
           product(step_rows, "rows", plan.sift_capacity, "tokens x " + std::to_string(sizeof(ScoredToken)) + " B"));
  }
  device("owners", plan.host_blocks * static_cast<std::int64_t>(sizeof(BlockOwner)), 1,
         product(plan.host_blocks, "blocks", sizeof(BlockOwner), "B"));
  // The CPU backend takes its working memory as it goes; builds without CUDA do not know the GPU's.
  if (config.device.starts_with("cuda")) {
    if (const auto scratch = static_cast<std::int64_t>(cuda_scratch_bytes(scratch_sizes(plan))); scratch > 0) {
      device("scratch", scratch, 1, "working memory of the kernels");
    }
  }
  device("control_block", ControlLayout(plan).bytes(), 1, "tokens, positions, sessions, block tables");
  return plan;
}

std::int64_t Plan::total(MemoryPlace place) const {
  std::int64_t sum = 0;
  for (const MemoryItem& item : items) {
    sum += item.place == place ? item.total() : 0;
  }
  return sum;
}

std::int64_t Plan::bytes_of(std::string_view name) const {
  for (const MemoryItem& item : items) {
    if (item.name == name) {
      return item.bytes;
    }
  }
  throw InvalidArgument("name: the plan has no item '" + std::string(name) + "'");
}

bool Plan::fits() const {
  const std::int64_t device = total(MemoryPlace::device);
  const std::int64_t host = total(MemoryPlace::host) + (config.device == "cpu" ? device : 0);
  return (limits.host_bytes == 0 || host <= limits.host_bytes) &&
         (config.device == "cpu" || limits.device_bytes == 0 || device <= limits.device_bytes);
}

std::int64_t Plan::sessions_of(std::int64_t tokens) const {
  if (tokens < 1 || tokens > config.max_context) {
    return 0;
  }
  return std::min(config.max_sessions, host_blocks / blocks_of(tokens));
}

std::string Plan::table() const {
  std::string text;
  char line[256];
  const auto row = [&](const char* a, const char* b, const char* c, const std::string& d) {
    std::snprintf(line, sizeof line, "%-16s %-8s %12s   %s\n", a, b, c, d.c_str());
    text += line;
  };
  row("what", "where", "bytes", "how");
  const bool unified = config.device == "cpu";
  for (const MemoryItem& item : items) {
    std::string how = item.formula;
    if (item.count > 1) {
      how += " x " + std::to_string(item.count) + " layers";
    }
    const char* where = item.place == MemoryPlace::host || unified ? "host" : "gpu";
    row(item.name.c_str(), where, bytes_text(item.total()).c_str(), how);
  }
  const auto sum = [&](const char* place, std::int64_t asked, std::int64_t available) {
    const std::string state = available == 0       ? "(not checked)"
                              : asked <= available ? "of " + bytes_text(available) + ", fits"
                                                   : "of " + bytes_text(available) + ", DOES NOT FIT";
    row("total", place, bytes_text(asked).c_str(), state);
  };
  const std::int64_t device_total = total(MemoryPlace::device);
  const std::int64_t host_total = total(MemoryPlace::host);
  if (unified) {
    sum("host", host_total + device_total, limits.host_bytes);
  } else {
    sum("gpu", device_total, limits.device_bytes);
    sum("host", host_total, limits.host_bytes);
  }
  return text;
}

}  // namespace echo
