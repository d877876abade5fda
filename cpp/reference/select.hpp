#pragma once

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// See SelectParams.
void select_rows(ThreadPool& pool, const SelectParams& params);

}  // namespace echo
