// index_queries: quantises the indexer's queries like its keys (FP8 keys) and lays them out for
// score.
//
// A warp per row and head. A query has one power-of-two scale, which moves into the head's weight;
// its codes are kept as the floats they stand for. Heads that only fill up a chunk get zeros. Cost:
// 32 KB written per row of V3.2, once per layer, so that no block of score has to do it again.
#include "kernels/elements.cuh"
#include "kernels/index_queries.hpp"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void index_queries(ScoreParams p, IndexQueryView queries) {
  const std::int64_t query = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_index();
  const std::int64_t row = query / queries.heads;
  const auto head = static_cast<std::int32_t>(query % queries.heads);
  if (row >= p.block.count) {
    return;
  }
  const std::int32_t dim = p.shape.index_dim;
  const std::int64_t source = (p.block.first + row) * p.shape.index_heads + head;
  const bool real = head < p.shape.index_heads;
  float scale = 1.0F;
  if (real && p.shape.index_key_format == IndexKeyFormat::fp8) {
    float amax = 0.0F;
    for (std::int32_t i = lane_index(); i < dim; i += kWarp) {
      amax = amax_with(amax, load_float(p.index_q, p.index_q_dtype, source * dim + i));
    }
    scale = power_of_two_scale(warp_max(amax));
  }
  const std::int64_t chunk = row * (queries.heads / kIndexHeadChunk) + head / kIndexHeadChunk;
  float* out = queries.values + chunk * dim * kIndexHeadChunk + head % kIndexHeadChunk;
  for (std::int32_t i = lane_index(); i < dim; i += kWarp) {
    float value = 0.0F;
    if (real) {
      value = load_float(p.index_q, p.index_q_dtype, source * dim + i);
      if (p.shape.index_key_format == IndexKeyFormat::fp8) {
        value = from_e4m3(to_e4m3(value / scale));
      }
    }
    out[static_cast<std::int64_t>(i) * kIndexHeadChunk] = value;
  }
  if (lane_index() == 0) {
    queries.weights[row * queries.heads + head] = real ? p.index_weights[source] * scale : 0.0F;
  }
}

}  // namespace

void launch_index_queries(const ScoreParams& params, const IndexQueryView& queries, const LaunchContext& context) {
  const std::int64_t count = static_cast<std::int64_t>(params.block.count) * queries.heads;
  launch(context, index_queries, blocks_for(count, kThreads / kWarp), kThreads, 0, params, queries);
}

}  // namespace echo
