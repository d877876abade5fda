#pragma once

#include <cstdint>

#include "kernels/params.hpp"
#include "kernels/sift_bounds.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// RowSift::bounds that follow from a histogram whose bins begin at `first`; 0 if it does not reach far enough down, or
/// if there would be too many candidates.
std::uint64_t sift_bounds(const std::int32_t* histogram, const SiftTargets& targets, std::int32_t first);

/// What score does with ScoreParams::sift once all scores are there.
void sift_rows(ThreadPool& pool, const ScoreParams& params);

}  // namespace echo
