#pragma once

#include <cstdint>
#include <string>

#include "echo/export.hpp"

namespace echo {

/// What a GPU is and can do for a runtime, found out by trying. Where something fails, `problem` says what, in
/// words, and the figures behind it are 0.
struct ECHO_API DeviceReport {
  std::string problem;  ///< empty if a runtime would work here
  int devices = 0;      ///< CUDA devices of this machine
  std::string name;
  int driver_version = 0;      ///< newest CUDA the driver supports, 13000 for 13.0
  int runtime_version = 0;     ///< CUDA this build was made with
  int compute_capability = 0;  ///< 90 for 9.0
  int multiprocessors = 0;
  int numa_node = -1;  ///< -1: one node, or unknown
  std::int64_t memory_bytes = 0;
  std::int64_t free_bytes = 0;
  std::int64_t pinned_limit_bytes = 0;   ///< host memory that can still be pinned
  double pin_gib_per_second = 0.0;       ///< taking pinned memory
  double to_device_gb_per_second = 0.0;  ///< one large copy, 10^9 bytes
  double to_host_gb_per_second = 0.0;
};

/// Looks at CUDA device number `device`; takes 256 MiB of pinned and of device memory for a moment. Never throws
/// for what is wrong with the machine.
ECHO_API DeviceReport device_report(int device = 0);

}  // namespace echo
