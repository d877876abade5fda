#pragma once
// Where the blocks of a team meet, in the L2 cache: the parts that they hand to each other, and the words by
// which they tell. A warp has the sums of 16 heads and 256 columns of its split, in registers as the tensor cores leave
// them; it writes them as they are, and tells the warps at its place in the other blocks.
//
// Sums travel as f16 times a power of two per head and half of the columns, chosen so that the largest is in
// [2^14, 2^15): an error of 2^-12 of the largest value of a head, less than what bf16 weights cost, for half of the
// bytes (64 KB per block).
//
// Nothing is cleared, neither between items nor between launches. Who tells counts what it has told so far, and all
// blocks of a team tell equally often. There are two places for parts, used in turns: who has told of an item has read
// the parts of the one before, so that the place of those is free once all have told.
// Cost, of an item with 16 splits on an H200: 2,100 cycles to write, 900 to tell, 1,800 until the last has told.

#include <cstdint>

#include "kernels/attend_sm90.hpp"
#include "kernels/elements.cuh"
#include "kernels/mla_heads.cuh"
#include "kernels/mla_outputs.cuh"
#include "kernels/mla_work.cuh"

namespace echo::mla {

inline constexpr std::uint32_t kConsumerWarps = kConsumers / kWarp;
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

/// Which pieces of its columns a warp puts together, of all splits.
class Pieces {
 public:
  /// The block's are those from `begin` on, before `end`, counted through its warps.
  __device__ __forceinline__ Pieces(const Work& work, std::uint32_t rank) {
    const std::uint32_t begin = work.by_splits(rank * kPieces * kConsumerWarps);
    const std::uint32_t end = work.by_splits((rank + 1) * kPieces * kConsumerWarps);
    const std::uint32_t others = kConsumerWarps - 1 - consumer_warp();
    first_ = (begin + others) / kConsumerWarps;
    count_ = (end + others) / kConsumerWarps - first_;
    asm volatile("" : "+r"(first_), "+r"(count_));  // now, not when all parts are there
  }
  __device__ __forceinline__ std::uint32_t first() const { return first_; }
  __device__ __forceinline__ std::uint32_t count() const { return count_; }
  __device__ __forceinline__ bool has(std::uint32_t piece) const { return piece - first_ < count_; }

 private:
  std::uint32_t first_;
  std::uint32_t count_;
};

/// The split whose word a lane looks at.
__device__ __forceinline__ std::uint32_t split_of_lane(std::uint32_t splits) {
  return min(static_cast<std::uint32_t>(lane_index()), splits - 1);
}
/// Whether as much has been told as `count` says; what was told is seen then.
__device__ __forceinline__ bool has_told(const std::uint32_t* word, std::uint32_t count) {
  return static_cast<std::int32_t>(ptx::load_acquire(word) - count) >= 0;
}

/// Where a consuming warp meets those at its place in the other blocks of its team, for one item. Made anew for each:
/// to be kept in registers while tiles are attended to, it is too much.
class Meeting {
 public:
  static constexpr bool kSumsApart = false;  ///< shares have the weights' sums of both warpgroups

  __device__ __forceinline__ Meeting(const AttendExchange& exchange, const Work& work, std::uint32_t turn,
                                     const Seat& seat, std::uint32_t splits)
      : parts_(static_cast<Part*>(exchange.parts) +
               (turn * static_cast<std::uint32_t>(work.deal.teams) + seat.team) * splits),
        told_(exchange.told + seat.team * kAttendTold + consumer_warp() * kMaxSplits),
        pieces_(work, seat.rank),
        splits_(splits),
        rank_(seat.rank) {
    count_ = told_[rank_] + 1;
  }

  __device__ __forceinline__ const Pieces& pieces() const { return pieces_; }
  __device__ __forceinline__ std::uint32_t splits() const { return splits_; }

  /// Writes a piece of the warp's sums to where it will be read.
  __device__ __forceinline__ void leave(std::uint32_t piece, const uint4& sums) const {
    parts_[rank_].sums[consumer_warp()][piece][lane_index()] = sums;
  }
  __device__ __forceinline__ Share* own_shares() const { return parts_[rank_].shares[consumer_warp()]; }

  __device__ __forceinline__ uint4 load(std::uint32_t piece, std::uint32_t split) const {
    return ptx::load(&parts_[split].sums[consumer_warp()][piece][lane_index()]);
  }
  __device__ __forceinline__ void load_if(bool there, std::uint32_t piece, std::uint32_t split, uint4& sums) const {
    ptx::load_if(there, &parts_[split].sums[consumer_warp()][piece][lane_index()], sums);
  }
  /// In the part of split 0.
  __device__ __forceinline__ const Share* shares() const { return parts_->shares[consumer_warp()]; }

  /// The warp's part is there.
  __device__ __forceinline__ void tell() const {
    __syncwarp();
    if (lane_index() == 0) {
      ptx::store_release(told_ + rank_, count_);
    }
  }
  /// Until all parts are.
  __device__ __forceinline__ void wait() const {
    const std::uint32_t split = split_of_lane(splits_);
    while (!__all_sync(kAllLanes, has_told(told_ + split, count_))) {
    }
    __syncwarp();
  }

 private:
  Part* parts_;          ///< of the team
  std::uint32_t* told_;  ///< by the warps at this place
  Pieces pieces_;
  std::uint32_t splits_;
  std::uint32_t rank_;
  std::uint32_t count_;
};

/// Writes a warp's sums to its part; returns what they are multiplied by, per head of the thread.
template <typename Meeting>
__device__ __forceinline__ void leave_sums(const Attention& attention, const Meeting& meeting, float (&units)[2]) {
  float largest[2] = {};
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    largest[head_of(i)] = fmaxf(largest[head_of(i)], fabsf(attention.out[i]));
  }
  const Unit scales[2] = {Unit(most_of_head(largest[0])), Unit(most_of_head(largest[1]))};
#pragma unroll
  for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
    std::uint32_t pairs[4];
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const float up = scales[i % 2].up;
      const std::uint32_t at = 8 * piece + 2 * i;
      pairs[i] = ptx::to_f16x2(attention.out[at] * up, attention.out[at + 1] * up);
    }
    meeting.leave(piece, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
  units[0] = scales[0].down;
  units[1] = scales[1].down;
}

/// And what there is to know about them.
__device__ __forceinline__ void leave_shares(const Attention& attention, const float (&sums)[2],
                                             const float (&units)[2], Share* shares) {
  if (lane_index() % 4 == 0) {
    Share* to = shares + lane_index() / 4;
    to[0] = {attention.reference[0], sums[0], units[0], 0.0F};
    to[8] = {attention.reference[1], sums[1], units[1], 0.0F};
  }
}

}  // namespace echo::mla
