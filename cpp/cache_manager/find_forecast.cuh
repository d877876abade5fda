#pragma once

#include "cache_manager/forecast_lists.hpp"
#include "kernels/launch.hpp"

namespace echo {

/// Has to have ended before the next score, and before k-th scores are reset.
void launch_find_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context);

}  // namespace echo
