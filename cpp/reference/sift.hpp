#pragma once

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// What score does with ScoreParams::sift once all scores are there.
void sift_rows(ThreadPool& pool, const ScoreParams& params);

}  // namespace echo
