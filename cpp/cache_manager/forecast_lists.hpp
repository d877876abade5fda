#pragma once

#include <cstdint>

#include "cache_manager/address.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Most rows that are forecast for a batch entry and layer on a GPU.
inline constexpr std::int32_t kMostForecast = 1024;
/// Multiprocessors that attention leaves to forecasts.
inline constexpr int kForecastSms = 4;

/// Of a layer, zero at first; see forecast_pace.cuh.
struct ForecastPace {
  std::int32_t most;     ///< rows of all entries that the next step may forecast; 0: not known
  std::int32_t fetched;  ///< in this step so far
  std::int32_t left;     ///< for which there was no time
  std::uint32_t warps;   ///< that are done
};

/// How many rows the next step may forecast after one that has fetched so many of a layer, and left some for want of
/// time: as many as there was time for, and some more to find out.
ECHO_HOST_DEVICE std::int32_t next_pace(std::int32_t most, std::int32_t fetched, std::int32_t left,
                                        std::int32_t entries) {
  constexpr std::int32_t kSpeedUp = 8;
  const std::int32_t known = most > fetched ? most : fetched;
  const std::int32_t next = left > 0 ? fetched : known + fetched / kSpeedUp + entries;
  const std::int32_t limit = entries * kMostForecast;
  return next < entries ? entries : (next < limit ? next : limit);
}

/// What find_forecast hands to fetch_forecast, of one layer.
struct ForecastLists {
  std::int32_t* counts;  ///< [entries] rows
  std::int32_t* rows;    ///< [entries, cap] host rows
  std::int32_t* slots;   ///< [entries, cap] theirs
  std::int32_t* ended;   ///< [1] not 0: there is no more time for it
  ForecastPace* pace;    ///< [1]
  std::int32_t cap;
};

/// Batch entries that have rows in the block.
inline std::int32_t forecast_entries(const ForecastParams& params) {
  const std::int32_t end = params.block.first + params.block.count;
  return params.block.count == 0 ? 0
                                 : (end - 1) / params.step.query_rows + 1 - params.block.first / params.step.query_rows;
}

}  // namespace echo
