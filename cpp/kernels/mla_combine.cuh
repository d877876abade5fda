#pragma once
// From sums to outputs, and the splits of a query put together through the second-level cache. A warp has the sums of
// 16 heads and 256 columns of its split, in registers as the tensor cores leave them. It writes them to device memory
// as they are, tells the warps at its place in the other blocks of the team, and puts together its share of those
// columns from all splits, in their order: a sixteenth of the columns at a time, all that it reads on its way at once.
//
// Sums travel as f16 times a power of two per head and half of the columns, chosen so that the largest is in
// [2^14, 2^15): an error of 2^-12 of the largest value of a head, less than what bf16 weights cost, for half of the
// bytes (64 KB per block).
//
// Nothing is cleared, neither between items nor between launches. Who tells counts what it has told so far, and all
// blocks of a team tell equally often. There are two places for parts, used in turns: who has told of an item has read
// the parts of the one before, so that the place of those is free once all have told.

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attend_cluster.hpp"
#include "kernels/elements.cuh"
#include "kernels/mla_heads.cuh"
#include "kernels/mla_work.cuh"

namespace echo::mla {

inline constexpr std::uint32_t kConsumerWarps = kConsumers / kWarp;
inline constexpr std::uint32_t kPieces = kColumns / 16;  ///< of a warp's columns: a register quadruple of f16 pairs
inline constexpr std::uint32_t kWarpHeads = 16;

/// What a block's sums of a head, in half of the columns, are relative to, what their weights add up to, and what the
/// f16 are multiplied by.
struct alignas(16) Share {
  float reference;
  float sum;
  float unit;
  float unused;
};

/// What a block hands to its team.
struct Part {
  uint4 sums[kConsumerWarps][kPieces][kWarp];
  Share shares[kConsumerWarps][kWarpHeads];
};
static_assert(sizeof(Part) == kAttendPartBytes);
static_assert(kConsumerWarps * kMaxSplits == kAttendTold);

/// 2^e that brings a value of this size into [2^14, 2^15), and its inverse.
struct Unit {
  float up;
  float down;

  __device__ __forceinline__ explicit Unit(float largest) {
    constexpr std::uint32_t kLeast = 30;  // of the exponent, for both to be normal
    constexpr std::uint32_t kMost = 254;
    const std::uint32_t exponent = min(max(bits_of(largest) >> 23, kLeast), kMost);
    up = float_of((127U + 127U + 14U - exponent) << 23);
    down = float_of((exponent - 14U) << 23);
  }
};

/// Which of the consuming warps this is.
__device__ __forceinline__ std::uint32_t consumer_warp() { return threadIdx.x / kWarp; }

/// Where a consuming warp meets those at its place in the other blocks of its team, for one item. Made anew for each:
/// to be kept in registers while tiles are attended to, it is too much.
class Meeting {
 public:
  __device__ __forceinline__ Meeting(const AttendExchange& exchange, const Work& work, std::uint32_t turn,
                                     std::uint32_t splits, const Shared& shared)
      : splits_(splits) {
    const auto ticket = static_cast<std::uint32_t>(ptx::load_shared_volatile(ptx::shared_address(&shared.ticket)));
    const std::uint32_t team = work.of_split(ticket);
    rank_ = ticket - team * splits;
    parts_ = static_cast<Part*>(exchange.parts) + (turn * static_cast<std::uint32_t>(work.clusters) + team) * splits;
    told_ = exchange.told + team * kAttendTold + consumer_warp() * kMaxSplits;
    count_ = told_[rank_] + 1;
    // The block's pieces of all warps: those from `begin` on, before `end`, counted through the warps.
    const std::uint32_t begin = work.of_split(rank_ * kPieces * kConsumerWarps);
    const std::uint32_t end = work.of_split((rank_ + 1) * kPieces * kConsumerWarps);
    const std::uint32_t others = kConsumerWarps - 1 - consumer_warp();
    first_piece_ = (begin + others) / kConsumerWarps;
    pieces_ = (end + others) / kConsumerWarps - first_piece_;
    asm volatile("" : "+r"(first_piece_), "+r"(pieces_));  // now, not when all are there
  }

  __device__ __forceinline__ Part& part(std::uint32_t split) const { return parts_[split]; }
  __device__ __forceinline__ Part& own() const { return part(rank_); }
  /// Which pieces of the warp's columns the block puts together, and how many.
  __device__ __forceinline__ std::uint32_t first_piece() const { return first_piece_; }
  __device__ __forceinline__ std::uint32_t pieces() const { return pieces_; }
  __device__ __forceinline__ std::uint32_t splits() const { return splits_; }

  /// The warp's part is there.
  __device__ __forceinline__ void tell() const {
    __syncwarp();
    if (lane_index() == 0) {
      ptx::store_release(told_ + rank_, count_);
    }
  }
  /// Until all parts are.
  __device__ __forceinline__ void wait() const {
    const std::uint32_t split = min(static_cast<std::uint32_t>(lane_index()), splits_ - 1);
    while (!__all_sync(kAllLanes, static_cast<std::int32_t>(ptx::load_acquire(told_ + split) - count_) >= 0)) {
    }
    __syncwarp();
  }

 private:
  Part* parts_;          ///< of the team
  std::uint32_t* told_;  ///< by the warps at this place
  std::uint32_t splits_;
  std::uint32_t rank_;
  std::uint32_t count_;
  std::uint32_t first_piece_;
  std::uint32_t pieces_;
};

/// Writes a warp's sums to its part; returns what they are multiplied by, per head of the thread.
__device__ __forceinline__ void leave_sums(const Attention& attention, Part& part, float (&units)[2]) {
  float largest[2] = {};
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    largest[head_of(i)] = fmaxf(largest[head_of(i)], fabsf(attention.out[i]));
  }
  const Unit scales[2] = {Unit(most_of_head(largest[0])), Unit(most_of_head(largest[1]))};
  uint4* to = part.sums[consumer_warp()][0] + lane_index();
#pragma unroll
  for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
    std::uint32_t pairs[4];
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const float up = scales[i % 2].up;
      const std::uint32_t at = 8 * piece + 2 * i;
      pairs[i] = ptx::to_f16x2(attention.out[at] * up, attention.out[at + 1] * up);
    }
    to[piece * kWarp] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  units[0] = scales[0].down;
  units[1] = scales[1].down;
}

/// And what there is to know about them.
__device__ __forceinline__ void leave_shares(const Attention& attention, const float (&sums)[2],
                                             const float (&units)[2], Part& part) {
  if (lane_index() % 4 == 0) {
    Share* to = part.shares[consumer_warp()] + lane_index() / 4;
    to[0] = {attention.reference[0], sums[0], units[0], 0.0F};
    to[8] = {attention.reference[1], sums[1], units[1], 0.0F};
  }
}

/// Where a warp's outputs go.
struct Outputs {
  void* out;
  DType dtype;
  std::int64_t at;     ///< element of the thread's first head and of its first column in piece 0
  std::int32_t heads;  ///< that exist from the thread's first one on

  __device__ __forceinline__ Outputs(const AttendParams& p, std::int64_t row, std::int32_t first)
      : out(p.out), dtype(p.out_dtype) {
    const auto head = first + static_cast<std::int32_t>(first_head());
    const std::uint32_t lane = static_cast<std::uint32_t>(lane_index()) % 4;
    const std::uint32_t column = threadIdx.x / kGroup * kColumns + lane % 2 * 8 + lane / 2 * 4;
    at = (row * p.shape.query_heads + head) * kLatent + column;
    heads = p.shape.query_heads - head;
  }

  /// Writes a piece, eight values as the tensor cores leave them. Two lanes exchange halves, so that each writes four
  /// columns next to each other, and four lanes a sector.
  __device__ __forceinline__ void store(std::uint32_t piece, const float (&values)[8], bool real = true) const {
    const bool odd = lane_index() % 2 != 0;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float* first = values + 2 * head;
      const float* second = first + 4;
      const std::int64_t to = at + head * 8 * kLatent + piece * 16;
      const float give[2] = {odd ? first[0] : second[0], odd ? first[1] : second[1]};
      const float keep[2] = {odd ? second[0] : first[0], odd ? second[1] : first[1]};
      if (dtype == DType::f32) {
        const float got[2] = {__shfl_xor_sync(kAllLanes, give[0], 1), __shfl_xor_sync(kAllLanes, give[1], 1)};
        if (real && head * 8 < heads) {
          *reinterpret_cast<float4*>(static_cast<float*>(out) + to) =
              odd ? make_float4(got[0], got[1], keep[0], keep[1]) : make_float4(keep[0], keep[1], got[0], got[1]);
        }
      } else {
        const std::uint32_t kept = ptx::to_bf16x2(keep[0], keep[1]);
        const std::uint32_t got = __shfl_xor_sync(kAllLanes, ptx::to_bf16x2(give[0], give[1]), 1);
        if (real && head * 8 < heads) {
          *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(out) + to) =
              odd ? make_uint2(got, kept) : make_uint2(kept, got);
        }
      }
    }
  }
};

/// Of a sum of weights; where nothing is selected, outputs are 0.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0F ? 0.0F : __frcp_rn(sum); }

/// The outputs of a selection that is one split.
__device__ __forceinline__ void write_alone(const Attention& attention, const float (&sums)[2],
                                            const Outputs& outputs) {
  const float factors[2] = {inverse_of(sums[0]), inverse_of(sums[1])};
#pragma unroll
  for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
    float values[8];
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) {
      values[i] = attention.out[8 * piece + i] * factors[head_of(static_cast<int>(i))];
    }
    outputs.store(piece, values);
  }
}

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

/// Puts together what the block has of the warp's columns, up to kMine pieces of up to kMost splits. Sums that there
/// are not count as zeros: to pass over them takes longer.
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
