#pragma once

#include "cache_manager/claim.cuh"
#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// First launch of recall: params.slots[entry] becomes the entry's host row, or kNone.
void launch_lookup_selected(const RecallParams& params, const ClaimView& claim, const LaunchContext& context);
/// First launch of append, for the rows of the pass.
void launch_lookup_new(const AppendParams& params, const ClaimView& claim, const LaunchContext& context);

}  // namespace echo
