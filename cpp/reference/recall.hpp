#pragma once

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// See RecallParams. Before any state changes, throws InvalidArgument naming `selection` if a
/// position is neither kNone nor one that the row can see, and StateError if `kv` is given and the
/// step is malformed. StateError naming `gpu_slots`, with no row evicted, if the block does not fit
/// the pool.
void recall_rows(ThreadPool& pool, const RecallParams& params);

}  // namespace echo
