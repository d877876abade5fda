#pragma once

#include "kernels/index_queries.hpp"
#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Second launch of score: the scores of all cached tokens.
void launch_score(const ScoreParams& params, const IndexQueryView& queries, const LaunchContext& context);

}  // namespace echo
