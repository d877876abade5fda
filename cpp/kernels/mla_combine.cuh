#pragma once
// The splits of a query put together: each warp its block's share of the columns that it had in its own split, from the
// warps at its place in the other blocks (mla_meet.cuh), in the order of the splits. All that it reads is on its way at
// once. Cost, of an item with 16 splits on an H200: 2,500 cycles until 64 KB are there, 850 to add and write.

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/mla_meet.cuh"
#include "kernels/mla_outputs.cuh"

namespace echo::mla {

/// What the splits' sums of the thread's heads are multiplied by: lane 4 i + j has those of splits j, j + 4, ...
template <std::uint32_t kMost>
class Factors {
 public:
  /// From the team's shares of the thread's first head, in the part of split 0.
  __device__ __forceinline__ Factors(const Share* shares, std::uint32_t splits) {
    const std::uint32_t lane = static_cast<std::uint32_t>(lane_index()) % 4;
    const char* from = reinterpret_cast<const char*>(shares) + lane * sizeof(Part);
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      shares_[0][i] = shares_[1][i] = make_uint4(bits_of(-INFINITY), 0, 0, 0);
      ptx::load_if(4 * i + lane < splits, from + 4 * i * sizeof(Part), shares_[0][i]);
      ptx::load_if(4 * i + lane < splits, from + 4 * i * sizeof(Part) + 8 * sizeof(Share), shares_[1][i]);
    }
  }

  /// Works them out, once the shares are there.
  __device__ __forceinline__ void weigh() {
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float overall = -INFINITY;
#pragma unroll
      for (std::uint32_t i = 0; i < kEach; ++i) {
        overall = fmaxf(overall, float_of(shares_[head][i].x));
      }
      overall = most_of_head(overall);
      const float origin = overall == -INFINITY ? 0.0F : overall;  // no inf - inf where nothing is selected
      float total = 0.0F;
#pragma unroll
      for (std::uint32_t i = 0; i < kEach; ++i) {
        of_[head][i] = ptx::exp2_approx(float_of(shares_[head][i].x) - origin);
        total = fmaf(of_[head][i], float_of(shares_[head][i].y), total);
      }
      total = sum_of_head(total);
      const float inverse = inverse_of(total);
#pragma unroll
      for (std::uint32_t i = 0; i < kEach; ++i) {
        of_[head][i] *= float_of(shares_[head][i].z) * inverse;
      }
    }
  }
  __device__ __forceinline__ float get(int head, std::uint32_t split) const {
    return __shfl_sync(kAllLanes, of_[head][split / 4], static_cast<int>(split % 4), 4);
  }

 private:
  static constexpr std::uint32_t kEach = (kMost + 3) / 4;
  uint4 shares_[2][kEach];
  float of_[2][kEach];
};

__device__ __forceinline__ void add_pair(std::uint32_t pair, float factor, float& first, float& second) {
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  first = fmaf(factor, values.x, first);
  second = fmaf(factor, values.y, second);
}

/// Puts together what the block has of the warp's columns, up to kMine pieces of up to kMost splits. Missing sums
/// count as zeros: to pass over them takes longer.
template <std::uint32_t kMost, std::uint32_t kMine>
__device__ __forceinline__ void combine_of(const AttendParams& p, std::int64_t row, std::int32_t first,
                                           const Meeting& meeting) {
  constexpr bool kExactly = kMost * kMine == kPieces;  // all blocks have the same
  constexpr std::uint32_t kFirst = kMost < 16 ? kMost : 16;
  const Part* part = &meeting.part(0);
  const std::uint32_t splits = kExactly ? kMost : meeting.splits();
  const std::uint32_t mine = kExactly ? kMine : meeting.pieces();
  Factors<kMost> factors(part->shares[consumer_warp()] + lane_index() / 4, splits);
  const char* from = reinterpret_cast<const char*>(part->sums[consumer_warp()][meeting.first_piece()] + lane_index());
  uint4 sums[kMine][kMost];
  const auto load = [&](std::uint32_t i, std::uint32_t split) {
    const char* at = from + split * sizeof(Part) + i * sizeof(part->sums[0][0]);
    if constexpr (kExactly) {
      sums[i][split] = ptx::load(at);
    } else {
      sums[i][split] = make_uint4(0, 0, 0, 0);
      ptx::load_if(split < (i < mine ? splits : 0U), at, sums[i][split]);
    }
  };
#pragma unroll
  for (std::uint32_t i = 0; i < kMine; ++i) {
#pragma unroll
    for (std::uint32_t split = 0; split < kFirst; ++split) {
      load(i, split);
    }
  }
  factors.weigh();
#pragma unroll
  for (std::uint32_t split = kFirst; split < kMost; ++split) {  // instead of the shares: not all have registers at once
    load(0, split);
  }
  const Outputs outputs(p, row, first);
  float values[kMine][8] = {};
#pragma unroll
  for (std::uint32_t split = 0; split < kMost; ++split) {
    const float of[2] = {factors.get(0, split), factors.get(1, split)};
#pragma unroll
    for (std::uint32_t i = 0; i < kMine; ++i) {
      add_pair(sums[i][split].x, of[0], values[i][0], values[i][1]);
      add_pair(sums[i][split].y, of[1], values[i][2], values[i][3]);
      add_pair(sums[i][split].z, of[0], values[i][4], values[i][5]);
      add_pair(sums[i][split].w, of[1], values[i][6], values[i][7]);
    }
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kMine; ++i) {
    outputs.store(meeting.first_piece() + i, values[i], i < mine);
  }
}

__device__ __forceinline__ void combine(const AttendParams& p, std::int64_t row, std::int32_t first,
                                        const Meeting& meeting) {
  const std::uint32_t splits = meeting.splits();
  if (splits == 2) {
    combine_of<2, 8>(p, row, first, meeting);
  } else if (splits == 3) {
    combine_of<3, 6>(p, row, first, meeting);
  } else if (splits == 4) {
    combine_of<4, 4>(p, row, first, meeting);
  } else if (splits == 5) {
    combine_of<5, 4>(p, row, first, meeting);
  } else if (splits < 8) {
    combine_of<7, 3>(p, row, first, meeting);
  } else if (splits == 8) {
    combine_of<8, 2>(p, row, first, meeting);
  } else if (splits < 16) {
    combine_of<15, 2>(p, row, first, meeting);
  } else if (splits == 16) {
    combine_of<16, 1>(p, row, first, meeting);
  } else {
    combine_of<kMaxSplits, 1>(p, row, first, meeting);
  }
}

}  // namespace echo::mla
