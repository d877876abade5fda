#pragma once

#include "cache_manager/claim.cuh"
#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Last launch of recall: fetches the missing rows and turns params.slots from host rows into
/// slots.
void launch_recall_copy(const RecallParams& params, const ClaimView& claim, const LaunchContext& context);

}  // namespace echo
