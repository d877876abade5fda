// select: the exact top-k of each row by radix on the ordered 32-bit key of a score
// (number_formats.hpp).
//
// A block of 1,024 threads per row. Three passes count keys by 11, 11 and 10 of their bits, each
// among the keys that agree with the k-th largest so far; a prefix sum over the histogram in shared
// memory finds the next digit. That gives the k-th key and how many scores of just that key belong
// to the k largest. A fourth pass counts, per warp and its contiguous part of the row, what is
// taken, and a fifth writes it, in order of position: ties go to the smaller one. The work does not
// depend on the scores; where most fall into one bin, a warp adds its share at once. Cost: five
// reads of the row from L2 by one multiprocessor, an estimated 25 us for 100K scores, rows in parallel.
#include "kernels/launch.cuh"
#include "kernels/number_formats.hpp"
#include "kernels/select.hpp"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 8;  ///< scores of a lane in flight
constexpr int kPiece = kLoads * kWarp;
constexpr int kBins = 2048;
static_assert(kBins == 2 * kThreads);

struct Shared {
  std::int32_t histogram[kBins];
  std::int32_t sums[kWarps];
  std::uint32_t digit;
  std::int32_t wanted;
};

/// The k-th largest key and how many scores of just that key belong to the k largest.
struct Cut {
  std::uint32_t key;
  std::int32_t equal;
};

/// Loads the keys of a piece of kPiece scores, a column per lane; false behind the end.
__device__ void load_keys(const float* scores, std::int32_t first, std::int32_t length, std::uint32_t (&keys)[kLoads],
                          bool (&valid)[kLoads]) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const std::int32_t at = first + i * kWarp + lane_index();
    valid[i] = at < length;
    keys[i] = valid[i] ? ordered_key(scores[at]) : 0U;
  }
}

/// Counts a bin per lane. The lanes that share the first one's bin are added by one atomic
/// operation.
__device__ void count(std::int32_t* histogram, std::uint32_t bin, bool counts) {
  const unsigned lanes = __ballot_sync(kAllLanes, counts);
  if (lanes == 0U) {
    return;
  }
  const int leader = __ffs(static_cast<int>(lanes)) - 1;
  const std::uint32_t shared_bin = __shfl_sync(kAllLanes, bin, leader);
  const bool same = counts && bin == shared_bin;
  const unsigned sharing = __ballot_sync(kAllLanes, same);
  if (lane_index() == leader) {
    atomicAdd(histogram + bin, __popc(sharing));
  } else if (counts && !same) {
    atomicAdd(histogram + bin, 1);
  }
}

/// Finds the bin, from the highest down, in which the `wanted`-th key lies, and how many are wanted
/// of that bin.
__device__ void find_digit(std::int32_t wanted, Shared& shared) {
  const int high = kBins - 1 - 2 * static_cast<int>(threadIdx.x);  // this thread's bins: high, high - 1
  const std::int32_t in_high = shared.histogram[high];
  const std::int32_t in_low = shared.histogram[high - 1];
  std::int32_t total = 0;
  const std::int32_t above = exclusive_sum<kThreads>(in_high + in_low, total, shared.sums);
  if (above < wanted && wanted <= above + in_high + in_low) {
    const bool is_high = wanted <= above + in_high;
    shared.digit = static_cast<std::uint32_t>(is_high ? high : high - 1);
    shared.wanted = wanted - above - (is_high ? 0 : in_high);
  }
  __syncthreads();
}

/// Requires 1 <= k <= length.
__device__ Cut find_cut(const float* scores, std::int32_t length, std::int32_t k, Shared& shared) {
  Cut cut{0U, k};
  std::uint32_t mask = 0U;
  for (int shift = 32; shift > 0;) {
    const int bits = min(11, shift);
    shift -= bits;
    const std::uint32_t digit_mask = (1U << bits) - 1U;
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
      shared.histogram[bin] = 0;
    }
    __syncthreads();
    for (std::int32_t first = warp_index() * kPiece; first < length; first += kWarps * kPiece) {
      std::uint32_t keys[kLoads];
      bool valid[kLoads];
      load_keys(scores, first, length, keys, valid);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        count(shared.histogram, (keys[i] >> shift) & digit_mask, valid[i] && (keys[i] & mask) == cut.key);
      }
    }
    __syncthreads();
    find_digit(cut.equal, shared);
    cut.key |= shared.digit << shift;
    cut.equal = shared.wanted;
    mask |= digit_mask << shift;
  }
  return cut;
}

/// Writes the positions of all larger keys and of the first equal ones, in order.
__device__ void take(const float* scores, std::int32_t length, Cut cut, std::int32_t* selection, Shared& shared) {
  const std::int32_t pieces = (length + kPiece - 1) / kPiece;
  const std::int32_t part = (pieces + kWarps - 1) / kWarps * kPiece;
  const auto begin =
      static_cast<std::int32_t>(min(static_cast<std::int64_t>(warp_index()) * part, static_cast<std::int64_t>(length)));
  const std::int32_t end = min(length - begin, part) + begin;
  std::uint32_t keys[kLoads];
  bool valid[kLoads];

  std::int32_t larger = 0;
  std::int32_t equal = 0;
  for (std::int32_t first = begin; first < end; first += kPiece) {
    load_keys(scores, first, end, keys, valid);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      larger += valid[i] && keys[i] > cut.key ? 1 : 0;
      equal += valid[i] && keys[i] == cut.key ? 1 : 0;
    }
  }
  // The sum over all threads before the warp's first lane is the sum over all warps before it.
  std::int32_t total = 0;
  larger = __shfl_sync(kAllLanes, exclusive_sum<kThreads>(larger, total, shared.sums), 0);
  equal = __shfl_sync(kAllLanes, exclusive_sum<kThreads>(equal, total, shared.sums), 0);
  std::int32_t next = larger + min(equal, cut.equal);

  const unsigned before = (1U << lane_index()) - 1U;
  for (std::int32_t first = begin; first < end; first += kPiece) {
    load_keys(scores, first, end, keys, valid);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_equal = valid[i] && keys[i] == cut.key;
      const unsigned equals = __ballot_sync(kAllLanes, is_equal);
      const bool taken = (valid[i] && keys[i] > cut.key) || (is_equal && equal + __popc(equals & before) < cut.equal);
      const unsigned takers = __ballot_sync(kAllLanes, taken);
      if (taken) {
        selection[next + __popc(takers & before)] = first + i * kWarp + lane_index();
      }
      next += __popc(takers);
      equal += __popc(equals);
    }
  }
}

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
    for (std::int32_t j = static_cast<std::int32_t>(threadIdx.x); j < k; j += kThreads) {
      selection[j] = j < length ? j : kNone;
    }
    return;
  }
  const Cut cut = find_cut(scores, length, k, shared);
  take(scores, length, cut, selection, shared);
  if (threadIdx.x == 0) {
    p.kth_score[row] = value_of_key(cut.key);
  }
}

}  // namespace

void launch_select(const SelectParams& params, const LaunchContext& context) {
  launch(context, select_rows, static_cast<unsigned>(params.block.count), kThreads, 0, params, context.errors);
}

}  // namespace echo
