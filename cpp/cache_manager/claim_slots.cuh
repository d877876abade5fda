#pragma once

#include "cache_manager/claim.cuh"
#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Second launch of recall: slots for the rows that lookup found missing, hits and misses counted.
void launch_claim_selected(const RecallParams& params, const ClaimView& claim, const LaunchContext& context);
/// Second launch of append; the rows of the pass are counted as appended.
void launch_claim_new(const AppendParams& params, const ClaimView& claim, const LaunchContext& context);

}  // namespace echo
