#include "echo/runtime_config.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <iterator>

#include "echo/errors.hpp"

namespace echo {
namespace {

using C = RuntimeConfig;

constexpr std::array kFields{
    ConfigField{"device", "", "where to run: auto (a GPU if there is one), cpu, cuda or cuda:N", &C::device,
                "auto, cpu, cuda or cuda:N"},
    ConfigField{"kernels", "",
                "on a GPU: generic, or auto, which takes those made for its architecture where the shape allows",
                &C::kernels, "auto or generic"},
    ConfigField{"host_tokens", "tokens", "size of the host pool, shared by all sessions; rounded up to 64",
                &C::host_tokens},
    ConfigField{"gpu_slots", "rows",
                "rows of the GPU pool of each layer; 0 means the least that works, "
                "max_batch x query_rows x (top_k + 1)",
                &C::gpu_slots},
    ConfigField{"max_batch", "sessions", "most sessions in one step", &C::max_batch},
    ConfigField{"query_rows", "tokens", "most new tokens per session and step (1 without speculative decoding)",
                &C::query_rows},
    ConfigField{"max_sessions", "sessions", "most sessions open at once", &C::max_sessions},
    ConfigField{"max_context", "tokens",
                "longest session, prompt and output together; rounded up to whole blocks of 64, at most host_tokens",
                &C::max_context},
    ConfigField{"prefill_chunk", "tokens", "most tokens in one prefill call", &C::prefill_chunk},
    ConfigField{"host_row_stride", "bytes",
                "distance of rows in the host pool, a multiple of 16; 0 means the "
                "bytes of a row",
                &C::host_row_stride},
    ConfigField{
        "attention_splits", "parts",
        "parts in which a selection is attended to and combined, 1 to 64 (the kernel for Hopper takes up to 32); 0 "
        "means the number that suits steps of max_batch x query_rows rows. On a GPU the last bits of outputs depend "
        "on it, never on the batch: set it where runtimes of several sizes have to agree in them",
        &C::attention_splits},
    ConfigField{"threshold_alpha", "",
                "weight of the past in the moving average that predicts the k-th score, "
                "0 to 1",
                &C::threshold_alpha},
    ConfigField{"prefetch", "",
                "on: a decode step lists what may be selected, and fetches what probably will be, while it "
                "scores; off: neither. On a GPU only the kernel for Hopper does it",
                &C::prefetch, "on or off"},
    ConfigField{"prefetch_cap", "rows per 1,000 tokens",
                "most rows that a layer of a step prefetches, for each 1,000 tokens that it scores, 0 to 1000; 0 means "
                "none, -1 what the device can fetch while it scores",
                &C::prefetch_cap},
    ConfigField{
        "forecast_cap", "rows per session",
        "most rows that a layer of a step fetches for the next one, for each session, 0 to 65536; those that "
        "just missed the selection come first. A forecast looks at half of top_k, on a GPU at 1,024 rows at most. 0 "
        "means none, -1 a tenth of top_k with a GPU's own kernels, else none",
        &C::forecast_cap},
    ConfigField{"threads", "threads", "threads of the CPU backend; 0 means one per core", &C::threads},
};

template <typename Number>
Number parse(std::string_view label, std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw InvalidArgument(std::string(label) + ": '" + std::string(text) + "' given, expected a number");
  }
  return value;
}

/// Whether a word of a list of choices stands for the text; "cuda:N" stands for any number.
bool stands_for(std::string_view word, std::string_view text) {
  if (!word.ends_with(":N")) {
    return word == text;
  }
  word.remove_suffix(1);
  return text.size() > word.size() && text.starts_with(word) &&
         text.find_first_not_of("0123456789", word.size()) == std::string_view::npos;
}

bool is_choice(std::string_view choices, std::string_view text) {
  while (!choices.empty()) {
    const std::size_t end = std::min(choices.find_first_of(", "), choices.size());
    const std::string_view word = choices.substr(0, end);
    if (!word.empty() && word != "or" && stands_for(word, text)) {
      return true;
    }
    choices.remove_prefix(std::min(end + 1, choices.size()));
  }
  return false;
}

void assign(RuntimeConfig& config, const ConfigField& field, std::string_view label, std::string_view text) {
  if (const auto* string = std::get_if<std::string C::*>(&field.member)) {
    if (!is_choice(field.choices, text)) {
      throw InvalidArgument(std::string(label) + ": '" + std::string(text) + "' given, expected " +
                            std::string(field.choices));
    }
    config.*(*string) = text;
  } else if (const auto* integer = std::get_if<std::int64_t C::*>(&field.member)) {
    config.*(*integer) = parse<std::int64_t>(label, text);
  } else {
    config.*std::get<double C::*>(field.member) = parse<double>(label, text);
  }
}

std::string variable_of(const ConfigField& field) {
  std::string name = "ECHO_";
  std::transform(field.name.begin(), field.name.end(), std::back_inserter(name),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return name;
}

}  // namespace

std::span<const ConfigField> config_fields() { return kFields; }

RuntimeConfig RuntimeConfig::from_env() {
  RuntimeConfig config;
  for (const ConfigField& field : kFields) {
    const std::string variable = variable_of(field);
    if (const char* text = std::getenv(variable.c_str()); text != nullptr) {
      assign(config, field, variable, text);
    }
  }
  return config;
}

void RuntimeConfig::set(std::string_view name, std::string_view text) {
  for (const ConfigField& field : kFields) {
    if (field.name == name) {
      assign(*this, field, field.name, text);
      return;
    }
  }
  throw InvalidArgument(std::string(name) + ": no such setting of the runtime");
}

}  // namespace echo
