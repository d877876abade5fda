#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Unmaps runs of host rows in all layers: a block per run and layer, so runs should be short.
/// `layers` and `runs` are device memory.
void launch_release(const LayerView* layers, std::int32_t layer_count, const RowRun* runs, std::int32_t run_count,
                    const LaunchContext& context);
/// Unmaps the host rows that the pass is about to write, for an append that takes no slots: what a
/// slot holds of them would be out of date.
void launch_unmap_new(const AppendParams& params, const LaunchContext& context);

}  // namespace echo
