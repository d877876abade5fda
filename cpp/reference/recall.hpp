#pragma once

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// See RecallParams. Throws InvalidArgument naming `selection`, before any state changes, if a
/// position is neither kNone nor one that the row can see; StateError naming `gpu_slots` if the
/// block does not fit the pool.
void recall_rows(ThreadPool& pool, const RecallParams& params);

}  // namespace echo
