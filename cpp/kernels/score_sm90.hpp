#pragma once

#include "kernels/launch.hpp"
#include "kernels/params.hpp"
#include "kernels/prefetch_queue.hpp"

namespace echo {

/// Whether the kernel for Hopper's tensor cores can score this shape on this device, and if so, prepares it: FP8 keys
/// of 128 dimensions, up to 64 heads, code for sm_90a in this build. A question of the model and the machine alone, so
/// that the scores of a model come from one kernel.
bool prepare_score_sm90(const ShapeView& shape, int device);

/// score in one launch; queries are quantised on the way. InvalidArgument if index_q is not aligned to 16 bytes.
/// `queue` is device memory that calls on a stream share.
void launch_score_sm90(const ScoreParams& params, PrefetchQueue* queue, const LaunchContext& context);

}  // namespace echo
