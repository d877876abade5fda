#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// See BeginParams.
void launch_owners(const BeginParams& params, const LaunchContext& context);

}  // namespace echo
