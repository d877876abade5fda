#pragma once

#include "cache_manager/forecast_lists.hpp"
#include "kernels/launch.hpp"

namespace echo {

/// Chooses rows, and slots for them. Has to have ended before the next score, and before k-th scores are reset.
void launch_find_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context);

/// There is no more time for the forecast of this layer and step.
void launch_end_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context);

}  // namespace echo
