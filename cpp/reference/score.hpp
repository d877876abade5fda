#pragma once

#include "kernels/params.hpp"
#include "reference/simd/score_loops.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// See ScoreParams. Throws StateError if the step is malformed or a row longer than the scores have
/// room for.
void score_rows(ThreadPool& pool, const ScoreLoops& loops, const ScoreParams& params);

}  // namespace echo
