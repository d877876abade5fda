#pragma once

#include "cache_manager/forecast_lists.hpp"
#include "kernels/launch.hpp"

namespace echo {

/// Thread blocks that fetch rows, each with a multiprocessor of its own.
int fetch_forecast_blocks();

/// Fetches the rows of the lists and maps them. Has to have ended before the layer's rows are looked up again.
void launch_fetch_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context);

}  // namespace echo
