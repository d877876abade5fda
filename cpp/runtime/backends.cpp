#include "runtime/backends.hpp"

#include <charconv>
#include <string>

#include "echo/errors.hpp"
#include "echo/runtime.hpp"
#include "runtime/host_memory_limit.hpp"

namespace echo {
namespace {

constexpr std::string_view kCuda = "cuda:";

/// Number behind "cuda:", or -1.
int device_number(std::string_view text) {
  int number = -1;
  if (text.starts_with(kCuda)) {
    text.remove_prefix(kCuda.size());
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size()) {
      return -1;
    }
  }
  return number;
}

}  // namespace

void require_device_name(const std::string& device) {
  if (device != "auto" && device != "cpu" && device != "cuda" && device_number(device) < 0) {
    throw InvalidArgument("device: '" + device + "' given, expected auto, cpu, cuda or cuda:N");
  }
}

std::string resolve_device(const std::string& device) {
  require_device_name(device);
  if (device == "cpu") {
    return device;
  }
  if (device == "auto") {
    return cuda_device_count() > 0 ? "cuda:0" : "cpu";
  }
  const int number = device == "cuda" ? 0 : device_number(device);
  if (const int count = cuda_device_count(); number >= count) {
    throw NotSupported("device: '" + device + "' given, but this build and machine offer " + std::to_string(count) +
                       " CUDA devices (" + build_info() + ")");
  }
  return std::string(kCuda) + std::to_string(number);
}

std::unique_ptr<Backend> make_backend(const std::string& resolved, const RuntimeConfig& config) {
  return resolved == "cpu" ? make_cpu_backend(config.threads) : make_cuda_backend(device_number(resolved), config);
}

bool wants_own_kernels(const RuntimeConfig& config) {
  if (config.kernels != "auto" && config.kernels != "generic") {
    throw InvalidArgument("kernels: '" + config.kernels + "' given, expected auto or generic");
  }
  return config.kernels == "auto";
}

MachineLimits machine_limits(const std::string& device) {
  const std::string resolved = resolve_device(device);
  const bool is_cpu = resolved == "cpu";
  const std::size_t limit = host_memory_limit();
  const std::size_t left = limit == kNoHostMemoryLimit ? 0 : limit + (is_cpu ? 0 : kept_host_bytes());
  return {.device_bytes = is_cpu ? 0 : cuda_free_bytes(device_number(resolved)),
          .host_bytes = static_cast<std::int64_t>(left)};
}

}  // namespace echo
