// commit: the k-th scores of a pass become part of what is predicted for their sessions.
//
// A thread per layer and batch entry folds the rows of the entry, which share a session, in order. A second launch
// forgets the k-th scores: rows of other entries, and those behind the pass, are nobody else's to clear. Cost: two
// launches, a chain of query_rows steps.
#include "kernels/commit.hpp"
#include "kernels/launch.cuh"
#include "kernels/prediction.hpp"

namespace echo {
namespace {

constexpr int kThreads = 128;

__global__ __launch_bounds__(kThreads) void fold(CommitParams p) {
  const std::int64_t entries = p.step.rows / p.step.query_rows;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= entries * p.layers) {
    return;
  }
  const auto layer = static_cast<std::int32_t>(i / entries);
  const auto first = static_cast<std::int32_t>(i % entries) * p.step.query_rows;
  const std::int32_t session = p.step.session[first];
  if (session == kNone) {
    return;
  }
  const float* scores = p.kth_score + layer * p.kth_stride + first;
  const std::int64_t place = static_cast<std::int64_t>(session) * p.layers + layer;
  float threshold = p.thresholds[place];
  float deviation = p.deviations[place];
  for (std::int32_t row = 0; row < p.step.query_rows; ++row) {
    observe(scores[row], p.alpha, threshold, deviation);
  }
  p.thresholds[place] = threshold;
  p.deviations[place] = deviation;
}

__global__ __launch_bounds__(kThreads) void forget(float* kth_score, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) {
    kth_score[i] = float_of(kFloatNan);
  }
}

}  // namespace

void launch_commit(const CommitParams& params, const LaunchContext& context) {
  const std::int64_t entries = params.step.rows / params.step.query_rows;
  launch(context, fold, blocks_for(entries * params.layers, kThreads), kThreads, 0, params);
  const std::int64_t scores = params.layers * params.kth_stride;
  launch(context, forget, blocks_for(scores, kThreads), kThreads, 0, params.kth_score, scores);
}

}  // namespace echo
