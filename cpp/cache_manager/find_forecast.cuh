#pragma once

#include "cache_manager/forecast_lists.hpp"
#include "kernels/launch.hpp"
#include "kernels/near_lists.hpp"

namespace echo {

/// Chooses rows of what select left, and slots for them. Has to have ended before the next score, and before k-th
/// scores are reset.
void launch_find_forecast(const ForecastParams& params, const NearLists& near, const ForecastLists& lists,
                          const LaunchContext& context);

/// There is no more time for what has not been fetched of these.
void launch_end_forecast(const ForecastLists& lists, const LaunchContext& context);

}  // namespace echo
