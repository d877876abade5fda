#pragma once

#include "echo/export.hpp"

namespace echo {

/// While on, pinned host memory of a runtime that is closed stays with the process, for the next runtime that needs
/// exactly as much on the same GPU: pinning 100 GB takes seconds, as for who compares settings. Turned off (which it is
/// at first), everything that was kept is given back. No meaning on the CPU.
ECHO_API void keep_host_memory(bool on);

}  // namespace echo
