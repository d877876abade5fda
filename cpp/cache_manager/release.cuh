#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Unmaps runs of host rows in all layers: a block per run and layer, so runs should be short.
/// `layers` and `runs` are device memory.
void launch_release(const LayerView* layers, std::int32_t layer_count, const RowRun* runs, std::int32_t run_count,
                    const LaunchContext& context);

}  // namespace echo
