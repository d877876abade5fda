#pragma once

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// See AppendParams. Throws StateError, before anything is written, if the step is malformed.
void append_rows(ThreadPool& pool, const AppendParams& params);

}  // namespace echo
