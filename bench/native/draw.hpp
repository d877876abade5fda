#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo::bench {

/// Selections of one replay: in each layer and for each batch entry, `hits_of` random resident tokens and `misses_of`
/// random others.
struct DrawParams {
  const LayerView* layers;  ///< [kLayers]
  StepView step;            ///< one row per entry; tokens up to its position are drawn from
  bool new_rows;            ///< the position is a new token's: it is selected, and not drawn
  std::uint32_t seed;
  const std::int32_t* hits_of;         ///< [rows]
  const std::int32_t* misses_of;       ///< [rows]
  const std::int32_t* missing_before;  ///< [rows] misses of the entries before
  std::int32_t misses;                 ///< of a layer
  std::int64_t layer_entries;          ///< between the selections of two layers
  std::int32_t* selection;             ///< [kLayers, rows, kTopK] positions, ascending, then kNone
  std::int32_t* slots;                 ///< the same shape: filled with what is no slot
  std::int32_t* missing;               ///< [kLayers, misses] host rows of the misses, ascending; or null
  std::int32_t* shuffled;              ///< [kLayers, misses] the same in random order; or null
  float* scores;                       ///< [kLayers, rows, score_stride], raised where selected; or null
  std::int64_t score_stride;
  std::int32_t* failed;  ///< [1] raised where there are fewer tokens than asked for
};

void launch_draw(const DrawParams& params, const LaunchContext& context);

}  // namespace echo::bench
