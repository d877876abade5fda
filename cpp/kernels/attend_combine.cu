// attend_combine: puts the splits of a selection together: each split's sums count by exp(its
// maximum - the overall maximum), in order of the splits, and the total is divided by the total of
// the softmax. A block per head and row, a thread per output column. Cost: reads splits x latent
// floats per head, from L2.
#include <cmath>

#include "kernels/attend.hpp"
#include "kernels/elements.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void attend_combine(AttendParams p, std::int32_t first,
                                                           AttendPartials partials) {
  const std::int64_t i = blockIdx.y;
  const std::int64_t head = blockIdx.x;
  const std::int64_t heads = p.shape.query_heads;
  const std::int64_t place = i * p.splits * heads + head;  // of split 0; splits are `heads` apart
  float most = -INFINITY;
  for (std::int32_t split = 0; split < p.splits; ++split) {
    most = fmaxf(most, partials.shares[place + split * heads].x);
  }
  const float origin = most == -INFINITY ? 0.0F : most;
  const std::int64_t out = ((p.block.first + first + i) * heads + head) * p.shape.latent_dim;
  for (std::int32_t column = static_cast<std::int32_t>(threadIdx.x); column < p.shape.latent_dim; column += kThreads) {
    float sum = 0.0F;
    float total = 0.0F;
    for (std::int32_t split = 0; split < p.splits; ++split) {
      const std::int64_t at = place + split * heads;
      const float2 share = partials.shares[at];
      const float factor = expf(share.x - origin);
      total = fmaf(factor, share.y, total);
      sum = fmaf(factor, partials.sums[at * p.shape.latent_dim + column], sum);
    }
    store_float(p.out, p.out_dtype, out + column, total == 0.0F ? 0.0F : sum / total);
  }
}

}  // namespace

void launch_attend_combine(const AttendParams& params, std::int32_t first, std::int32_t count,
                           const AttendPartials& partials, const LaunchContext& context) {
  const dim3 grid(static_cast<unsigned>(params.shape.query_heads), static_cast<unsigned>(count));
  launch(context, attend_combine, grid, kThreads, 0, params, first, partials);
}

}  // namespace echo
