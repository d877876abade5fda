#include "runtime/backends.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>

#include "echo/errors.hpp"
#include "echo/runtime.hpp"

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

/// First number of a file, -1 where there is none ("max", no such file).
std::int64_t number_in(const char* path) {
  std::ifstream file(path);
  std::int64_t value = -1;
  return file >> value ? value : -1;
}

/// Memory that can still be had, as the kernel estimates it; 0 if it does not say.
std::int64_t available_host_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::int64_t available = 0;
  for (std::string word; meminfo >> word;) {
    if (word == "MemAvailable:") {
      std::int64_t kib = 0;
      meminfo >> kib;
      available = kib * 1024;
      break;
    }
  }
  const std::int64_t limit = number_in("/sys/fs/cgroup/memory.max");
  const std::int64_t used = number_in("/sys/fs/cgroup/memory.current");
  if (limit > 0 && used >= 0) {
    available = std::min(available, std::max<std::int64_t>(limit - used, 0));
  }
  return available;
}

}  // namespace

std::string resolve_device(const std::string& device) {
  if (device == "cpu") {
    return device;
  }
  if (device == "auto") {
    return cuda_device_count() > 0 ? "cuda:0" : "cpu";
  }
  const int number = device == "cuda" ? 0 : device_number(device);
  if (number < 0) {
    throw InvalidArgument("device: '" + device + "' given, expected auto, cpu, cuda or cuda:N");
  }
  if (const int count = cuda_device_count(); number >= count) {
    throw NotSupported("device: '" + device + "' given, but this build and machine offer " +
                       std::to_string(count) + " CUDA devices (" + build_info() + ")");
  }
  return std::string(kCuda) + std::to_string(number);
}

std::unique_ptr<Backend> make_backend(const std::string& resolved, const RuntimeConfig& config) {
  return resolved == "cpu" ? make_cpu_backend(config.threads)
                           : make_cuda_backend(device_number(resolved), config);
}

MachineLimits machine_limits(const std::string& device) {
  const std::string resolved = resolve_device(device);
  return {.device_bytes = resolved == "cpu" ? 0 : cuda_free_bytes(device_number(resolved)),
          .host_bytes = available_host_bytes()};
}

}  // namespace echo
