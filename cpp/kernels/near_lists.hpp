#pragma once

#include <cstdint>

#include "kernels/params.hpp"

namespace echo {

/// Tokens that select leaves of a row for a forecast, at most.
inline constexpr std::int32_t kMostNear = 4096;

/// What select leaves besides the selection, where there are forecasts: the list that it found it in, with tokens that
/// just missed it. And what it says meanwhile: the next recall is near, and forecasts have to leave the link to it.
struct NearLists {
  ScoredToken* tokens = nullptr;   ///< [block.count, kMostNear] in any order; null: nobody wants them
  std::int32_t* counts = nullptr;  ///< [block.count] tokens of the lists, 0: there was none; the first are left
  std::int32_t* ended = nullptr;   ///< [1] ForecastLists::ended of the layer that is being fetched; null: none
};

}  // namespace echo
