// select: the exact top-k of each row by radix on the ordered 32-bit key of a score
// (number_formats.hpp). The general kernel; what score sifted is not looked at.
//
// A block of 1,024 threads per row. Three passes count keys by 11, 11 and 10 of their bits, each
// among the keys that agree with the k-th largest so far; a prefix sum over the histogram in shared
// memory finds the next digit. That gives the k-th key and how many scores of just that key belong
// to the k largest. A fourth pass counts, per warp and its contiguous part of the row, what is
// taken, and a fifth writes it, in order of position: ties go to the smaller one. The work does not
// depend on the scores. Cost: five reads of the row from L2 by one multiprocessor, rows in parallel;
// on an H200 150 us for 100K scores.
#include "kernels/launch.cuh"
#include "kernels/select.hpp"
#include "kernels/select_passes.cuh"
#include "kernels/step_rows.cuh"

namespace echo {
namespace {

using namespace top_k;

constexpr int kThreads = 1024;

struct Shared {
  alignas(16) std::int32_t histogram[kBins];
  Scan scan;
};

__global__ __launch_bounds__(kThreads, 1) void select_rows(SelectParams p, KernelErrorView errors) {
  __shared__ Shared shared;
  const std::int32_t k = p.shape.top_k;
  const std::int64_t row = p.block.first + static_cast<std::int64_t>(blockIdx.x);
  const float* scores = p.scores + blockIdx.x * p.score_stride;
  std::int32_t* selection = p.selection + row * k;
  std::int32_t length = position_of(p.step, static_cast<std::int32_t>(row), errors) + 1;
  if (length > p.score_stride) {
    errors.raise(KernelError::bad_position);
    length = 0;
  }
  if (length < k) {
    return write_all<kThreads>(length, k, selection);
  }
  const Part whole{0, length};
  const auto histogram = [&](int shift, std::uint32_t digit_mask, std::uint32_t known, std::uint32_t mask) {
    clear<kThreads>(shared.histogram);
    __syncthreads();
    count_digits<kThreads>(scores, whole, known, mask, shift, digit_mask, shared.histogram);
    __syncthreads();
    return shared.histogram;
  };
  const Cut cut = find_cut<kThreads>(k, shared.scan, histogram);
  Counts total{};
  const Counts before = count_taken<kThreads>(scores, whole, cut.key, total, shared.scan.sums);
  write_taken<kThreads>(scores, whole, cut, before, selection);
  if (threadIdx.x == 0) {
    p.kth_score[row] = value_of_key(cut.key);
  }
}

}  // namespace

void launch_select(const SelectParams& params, const LaunchContext& context) {
  launch(context, select_rows, static_cast<unsigned>(params.block.count), kThreads, 0, params, context.errors);
}

}  // namespace echo
