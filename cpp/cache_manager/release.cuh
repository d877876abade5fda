#pragma once

#include <cstdint>
#include <span>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

inline constexpr std::int32_t kReleasedAtOnce = 4096;  ///< rows, by a block

/// Unmaps runs of host rows in all layers: a block per run and layer, so runs should have kReleasedAtOnce rows at most.
/// `layers` are in device memory, `runs` need not live longer than the call.
void launch_release(const LayerView* layers, std::int32_t layer_count, std::span<const RowRun> runs,
                    const LaunchContext& context);

}  // namespace echo
