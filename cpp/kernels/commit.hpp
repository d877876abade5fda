#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

void launch_commit(const CommitParams& params, const LaunchContext& context);

}  // namespace echo
