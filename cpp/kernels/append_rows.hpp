#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Writes the new rows of a pass to their host rows, and to their slots where they are mapped.
void launch_append_rows(const AppendParams& params, const LaunchContext& context);

}  // namespace echo
