#pragma once

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// See AppendParams. Throws StateError, before anything is written, if the step is malformed or the
/// pool too small.
void append_rows(ThreadPool& pool, const AppendParams& params);

}  // namespace echo
