#pragma once

#include "kernels/params.hpp"

namespace echo {

/// See CommitParams.
void commit_thresholds(const CommitParams& params);

}  // namespace echo
