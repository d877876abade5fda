#include "runtime/host_memory_limit.hpp"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace echo {
namespace {

namespace fs = std::filesystem;

/// First word of a file; empty if it cannot be read.
std::string word_of(const fs::path& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

/// A number as control groups and /proc write it; nothing for "max" and for unreadable files.
std::optional<std::size_t> number_of(const std::string& word) {
  if (word.empty() || word.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return std::stoull(word);
}

/// The number behind `key` in a file of "key number" lines.
std::optional<std::size_t> field_of(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    if (word == key && file >> word) {
      return number_of(word);
    }
  }
  return std::nullopt;
}

/// What one control group leaves; its page cache can be reclaimed and counts as free.
std::size_t left_in(const fs::path& group, const char* limit_file, const char* usage_file, const char* cache_key) {
  const auto limit = number_of(word_of(group / limit_file));
  const auto usage = number_of(word_of(group / usage_file));
  if (!limit || !usage) {
    return kNoHostMemoryLimit;
  }
  const std::size_t cache = field_of(group / "memory.stat", cache_key).value_or(0);
  const std::size_t used = *usage - std::min(cache, *usage);
  return *limit - std::min(used, *limit);
}

/// The tightest of this process's control groups and their ancestors, versions 1 and 2.
std::size_t left_in_control_groups() {
  std::size_t left = kNoHostMemoryLimit;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "4:memory:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controller = line.substr(first + 1, second - first - 1);
    const bool unified = controller.empty();
    if (!unified && controller != "memory") {
      continue;
    }
    const fs::path root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (fs::path group = line.substr(second + 1);; group = group.parent_path()) {
      const fs::path folder = root / group.relative_path();
      left = std::min(
          left, unified ? left_in(folder, "memory.max", "memory.current", "inactive_file")
                        : left_in(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"));
      if (group == group.parent_path()) {
        break;
      }
    }
  }
  return left;
}

/// Bytes that the machine has beyond what the kernel manages now: those in the balloon, less a
/// share for what the kernel itself set aside at the start.
std::size_t in_balloon() {
  std::size_t present = 0;
  std::size_t managed = 0;
  std::ifstream zones("/proc/zoneinfo");
  for (std::string word; zones >> word;) {
    if (word == "present" || word == "managed") {
      std::size_t pages = 0;
      zones >> pages;
      (word == "present" ? present : managed) += pages;
    }
  }
  const std::size_t expected = managed + present / 32;
  return (present - std::min(expected, present)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

/// Bytes that the hypervisor may still add, kNoHostMemoryLimit where it does not say.
std::size_t may_grow_by() {
  std::size_t growth = 0;
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator("/sys/bus/virtio/devices", unreadable)) {
    const std::string type = word_of(entry.path() / "device");
    if (type == "0x0018") {  // virtio-mem
      return kNoHostMemoryLimit;
    }
    if (type == "0x0005") {
      growth = in_balloon();
    }
  }
  return growth;
}

}  // namespace

std::size_t host_memory_limit() {
  const std::size_t left = left_in_control_groups();
  const auto available_kib = field_of("/proc/meminfo", "MemAvailable:");
  const std::size_t growth = may_grow_by();
  if (!available_kib || growth == kNoHostMemoryLimit) {
    return left;
  }
  return std::min(left, *available_kib * 1024 + growth);
}

}  // namespace echo
