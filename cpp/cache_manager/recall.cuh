#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// The whole of recall, see RecallParams. `forecasts`: rows may have been forecast; whether they were used is counted.
void launch_recall(const RecallParams& params, bool forecasts, const LaunchContext& context);

}  // namespace echo
