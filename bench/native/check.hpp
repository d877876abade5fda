#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo::bench {

/// What was found, over all layers.
struct Findings {
  unsigned long long wrong_entries;  ///< entries whose slot is not their row's
  unsigned long long wrong_maps;     ///< slots and host rows whose maps contradict each other
  unsigned long long wrong_rows;     ///< slots whose bytes are not their row's
  unsigned long long resident;       ///< slots that hold a row
};

struct CheckParams {
  const LayerView* layers;  ///< [layer_count]
  std::int32_t layer_count;
  StepView step;
  std::int32_t slots;  ///< of a layer
  std::int64_t host_rows;
  std::int64_t layer_entries;
  const std::int32_t* selection;     ///< [layer_count, rows, kTopK]
  const std::int32_t* chosen_slots;  ///< what recall made of it
  bool bytes;                        ///< whether the pools' bytes are looked at
  std::int32_t session_rows;         ///< host rows of a session ...
  std::int32_t first_new;            ///< ... of which those from here on are compared with the slab
  Findings* findings;                ///< added to
};

void launch_check(const CheckParams& params, const LaunchContext& context);

}  // namespace echo::bench
