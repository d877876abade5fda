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
  /// From the shares of a warp's heads in the part of split 0, of all of them.
  __device__ __forceinline__ Factors(const Share* shares, std::uint32_t splits) {
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      shares_[0][i] = shares_[1][i] = make_uint4(bits_of(-INFINITY), 0, 0, 0);
      ptx::load_if(is_split(i, splits), share(shares, i, 0), shares_[0][i]);
      ptx::load_if(is_split(i, splits), share(shares, i, 1), shares_[1][i]);
    }
  }
  /// Likewise from the shares of the warp that has the other columns of these heads, the sums of weights.
  __device__ __forceinline__ void request_sums(const Share* others, std::uint32_t splits) {
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
#pragma unroll
      for (std::uint32_t head = 0; head < 2; ++head) {
        shares_[head][i].w = 0;
        ptx::load_if(is_split(i, splits), &share(others, i, head)->sum, shares_[head][i].w);
      }
    }
  }
  /// Once they are there.
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
#pragma unroll
      for (std::uint32_t head = 0; head < 2; ++head) {
        shares_[head][i].y = bits_of(float_of(shares_[head][i].y) + float_of(shares_[head][i].w));
      }
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

  static __device__ __forceinline__ std::uint32_t split_of(std::uint32_t i) {
    return 4 * i + static_cast<std::uint32_t>(lane_index()) % 4;
  }
  static __device__ __forceinline__ bool is_split(std::uint32_t i, std::uint32_t splits) {
    return split_of(i) < splits;
  }
  static __device__ __forceinline__ const Share* share(const Share* shares, std::uint32_t i, std::uint32_t head) {
    const char* from = reinterpret_cast<const char*>(shares + lane_index() / 4 + 8 * head);
    return reinterpret_cast<const Share*>(from + split_of(i) * sizeof(Part));
  }

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
template <std::uint32_t kMost, std::uint32_t kMine, typename Meeting>
__device__ __forceinline__ void combine_of(const AttendParams& p, std::int64_t row, std::int32_t first,
                                           const Meeting& meeting) {
  constexpr bool kExactly = kMost * kMine == kPieces;  // all blocks have the same
  constexpr std::uint32_t kFirst = kMost < 16 ? kMost : 16;
  const std::uint32_t splits = kExactly ? kMost : meeting.splits();
  const std::uint32_t first_piece = meeting.pieces().first();
  const std::uint32_t mine = kExactly ? kMine : meeting.pieces().count();
  Factors<kMost> factors(meeting.shares(), splits);
  if constexpr (Meeting::kSumsApart) {
    factors.request_sums(meeting.other_shares(), splits);
  }
  uint4 sums[kMine][kMost];
  const auto load = [&](std::uint32_t i, std::uint32_t split) {
    if constexpr (kExactly) {
      sums[i][split] = meeting.load(first_piece + i, split);
    } else {
      sums[i][split] = make_uint4(0, 0, 0, 0);
      meeting.load_if(split < (i < mine ? splits : 0U), first_piece + i, split, sums[i][split]);
    }
  };
#pragma unroll
  for (std::uint32_t i = 0; i < kMine; ++i) {
#pragma unroll
    for (std::uint32_t split = 0; split < kFirst; ++split) {
      load(i, split);
    }
  }
  if constexpr (Meeting::kSumsApart) {
    factors.add_sums();
  }
  factors.weigh();
#pragma unroll
  for (std::uint32_t split = kFirst; split < kMost; ++split) {  // instead of the shares: not all have registers at once
    load(0, split);
  }
  const Outputs outputs(p, row, first);
  Values values[kMine] = {};
#pragma unroll
  for (std::uint32_t split = 0; split < kMost; ++split) {
    const float of[2] = {factors.get(0, split), factors.get(1, split)};
#pragma unroll
    for (std::uint32_t i = 0; i < kMine; ++i) {
      add_pair(sums[i][split].x, of[0], values[i].of[0], values[i].of[1]);
      add_pair(sums[i][split].y, of[1], values[i].of[2], values[i].of[3]);
      add_pair(sums[i][split].z, of[0], values[i].of[4], values[i].of[5]);
      add_pair(sums[i][split].w, of[1], values[i].of[6], values[i].of[7]);
    }
  }
  outputs.store<kMine>(first_piece, mine, [&](std::uint32_t i) { return values[i]; });
}

/// Likewise, for any number of splits from 2 on.
template <typename Meeting>
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
