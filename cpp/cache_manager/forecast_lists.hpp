#pragma once

#include <cstdint>

#include "kernels/params.hpp"

namespace echo {

/// Most rows that are forecast for a batch entry and layer on a GPU.
inline constexpr std::int32_t kMostForecast = 1024;

/// What find_forecast hands to fetch_forecast, of one layer.
struct ForecastLists {
  std::int32_t* counts;  ///< [entries] rows
  std::int32_t* rows;    ///< [entries, cap] host rows
  std::int32_t* slots;   ///< [entries, cap] theirs
  std::int32_t* ended;   ///< [1] tick in which there was no more time for it, lately
  std::int32_t cap;
};

/// Batch entries that have rows in the block.
inline std::int32_t forecast_entries(const ForecastParams& params) {
  const std::int32_t end = params.block.first + params.block.count;
  return params.block.count == 0 ? 0
                                 : (end - 1) / params.step.query_rows + 1 - params.block.first / params.step.query_rows;
}

}  // namespace echo
