#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// The whole of recall, see RecallParams.
void launch_recall(const RecallParams& params, const LaunchContext& context);

}  // namespace echo
