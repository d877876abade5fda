#pragma once
// Where the blocks of a team meet, in the second-level cache: the parts that they hand to each other, and the words by
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

/// Where a consuming warp meets those at its place in the other blocks of its team, for one item. Made anew for each:
/// to be kept in registers while tiles are attended to, it is too much.
class Meeting {
 public:
  __device__ __forceinline__ Meeting(const AttendExchange& exchange, const Work& work, std::uint32_t turn,
                                     const Seat& seat, std::uint32_t splits)
      : parts_(static_cast<Part*>(exchange.parts) +
               (turn * static_cast<std::uint32_t>(work.deal.teams) + seat.team) * splits),
        told_(exchange.told + seat.team * kAttendTold + consumer_warp() * kMaxSplits),
        splits_(splits),
        rank_(seat.rank) {
    count_ = told_[rank_] + 1;
    // The block's pieces of all warps: those from `begin` on, before `end`, counted through the warps.
    const std::uint32_t begin = work.by_splits(rank_ * kPieces * kConsumerWarps);
    const std::uint32_t end = work.by_splits((rank_ + 1) * kPieces * kConsumerWarps);
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

}  // namespace echo::mla
