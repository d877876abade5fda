#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Writes the new rows and index keys of a pass, see AppendParams.
void launch_append(const AppendParams& params, const LaunchContext& context);

}  // namespace echo
