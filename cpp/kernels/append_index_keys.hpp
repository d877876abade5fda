#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Writes the index keys of a pass's new tokens to their places in the index cache.
void launch_append_index_keys(const AppendParams& params, const LaunchContext& context);

}  // namespace echo
