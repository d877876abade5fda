#pragma once

#include "kernels/params.hpp"
#include "reference/simd/attend_loops.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// See AttendParams. Throws NotSupported for raw rows and StateError naming `slots` for a slot that
/// is not there. `splits` is not used: the sums run over the whole selection in one go, as the
/// formula is written. Backends agree within rounding; each one's own bits do not depend on the
/// batch.
void attend_rows(ThreadPool& pool, const AttendLoops& loops, const AttendParams& params);

}  // namespace echo
