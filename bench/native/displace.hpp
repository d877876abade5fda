#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo::bench {

/// In each layer and for each batch entry, `misses_of` random rows of its selection, all of which is resident, lose
/// their slots; as many random rows that are not resident are to come in for them, and `more_of` besides.
struct DisplaceParams {
  const LayerView* layers;  ///< [layer_count]
  std::int32_t layer_count;
  StepView step;  ///< one row per entry
  bool new_rows;  ///< the row of the position itself is none of the misses, and must not be resident afterwards
  bool whole;     ///< pools hold all rows: there may be none to come in
  std::uint32_t seed;
  const std::int32_t* misses_of;       ///< [rows]
  const std::int32_t* missing_before;  ///< [rows] misses of the entries before
  const std::int32_t* more_of;         ///< [rows]
  std::int32_t misses;                 ///< of a layer
  const std::int32_t* selection;       ///< [layer_count, rows, kTopK]
  std::int32_t* missing;               ///< [layer_count, misses] host rows that lost their slots, ascending
  std::int32_t* coming;                ///< [layer_count, rows, kTopK] positions that are to come in, then kNone
  std::int32_t* failed;                ///< [1] raised where there are too few
};

void launch_displace(const DisplaceParams& params, const LaunchContext& context);

}  // namespace echo::bench
