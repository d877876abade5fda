#pragma once

#include <cstddef>
#include <limits>

namespace echo {

/// What host_memory_limit() says where nothing limits the process.
inline constexpr std::size_t kNoHostMemoryLimit = std::numeric_limits<std::size_t>::max();

/// Bytes of host memory that this process can still take: what its control groups leave, and what
/// the machine has available. Where the hypervisor adds memory as it is used, MemAvailable of
/// /proc/meminfo tells only part of that: what lies in a memory balloon comes on top, and with
/// virtio-mem only control groups are a limit.
std::size_t host_memory_limit();

}  // namespace echo
