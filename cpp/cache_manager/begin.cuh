#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// See BeginParams. `layers`: its layers, in device memory.
void launch_begin(const BeginParams& params, const LayerView* layers, const LaunchContext& context);

}  // namespace echo
