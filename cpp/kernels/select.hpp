#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

void launch_select(const SelectParams& params, const LaunchContext& context);

}  // namespace echo
