#pragma once
// Launches in which each team has one whole item, as most decode steps are: no loop over items, nothing that is handed
// over, no next query. So less code is run, which each layer has to fetch anew, and it lies together.
//
// Parts are those of mla_meet.cuh, so outputs have the same bits, but what a block puts together itself stays in its
// shared memory, where the query was: with 4 splits a quarter. And a share has the sum of the weights of one
// warpgroup's halves only; whoever reads it adds the other's, so that the two need not meet before they write.
// Cost, of an item with 4 splits on an H200, in a layer of 13 sessions (and right behind itself): 1,700 cycles (1,600)
// to write, 3,000 (3,100) until the last block has told and that is seen, 3,900 (2,700) to read 48 KB, add and write.

#include <cstdint>

#include "kernels/attend_sm90.hpp"
#include "kernels/mla_attend.cuh"
#include "kernels/mla_combine.cuh"
#include "kernels/mla_meet.cuh"
#include "kernels/mla_outputs.cuh"
#include "kernels/mla_work.cuh"

namespace echo::mla {

/// Where a consuming warp meets those at its place, and at the other warpgroup's, in the other blocks of its team.
class SoleMeeting {
 public:
  static constexpr bool kSumsApart = true;

  __device__ __forceinline__ SoleMeeting(const AttendExchange& exchange, const Work& work, const Seat& seat,
                                         std::uint32_t splits, Shared& shared)
      : parts_(static_cast<Part*>(exchange.parts) + seat.team * splits),
        told_(exchange.told + seat.team * kAttendTold),
        pieces_(work, seat.rank),
        kept_(ptx::shared_address(reinterpret_cast<const Part&>(shared.query).sums[consumer_warp()][0] + lane_index())),
        splits_(splits),
        rank_(seat.rank) {}
  static_assert(sizeof(Part) <= sizeof(Shared::query));

  __device__ __forceinline__ const Pieces& pieces() const { return pieces_; }
  __device__ __forceinline__ std::uint32_t splits() const { return splits_; }

  /// Writes a piece of the warp's sums to where it will be read.
  __device__ __forceinline__ void leave(std::uint32_t piece, const uint4& sums) const {
    ptx::store_either(pieces_.has(piece), kept_ + piece * kPiece,
                      &parts_[rank_].sums[consumer_warp()][piece][lane_index()], sums);
  }
  __device__ __forceinline__ Share* own_shares() const { return parts_[rank_].shares[consumer_warp()]; }

  __device__ __forceinline__ uint4 load(std::uint32_t piece, std::uint32_t split) const {
    return ptx::load_either(split == rank_, kept_ + piece * kPiece,
                            &parts_[split].sums[consumer_warp()][piece][lane_index()]);
  }
  __device__ __forceinline__ void load_if(bool there, std::uint32_t piece, std::uint32_t split, uint4& sums) const {
    if (there) {
      sums = load(piece, split);
    }
  }
  __device__ __forceinline__ const Share* shares() const { return parts_->shares[consumer_warp()]; }
  __device__ __forceinline__ const Share* other_shares() const {
    return parts_->shares[consumer_warp() ^ kGroup / kWarp];
  }

  /// The warp's part is there; returns when all parts are.
  __device__ __forceinline__ void meet() const {
    std::uint32_t* const own = told_ + consumer_warp() * kMaxSplits;
    const std::uint32_t* const other = told_ + (consumer_warp() ^ kGroup / kWarp) * kMaxSplits;
    const std::uint32_t count = own[rank_] + 1;  // all warps of a team have told equally often
    __syncwarp();
    if (lane_index() == 0) {
      ptx::store_release(own + rank_, count);
    }
    const std::uint32_t split = split_of_lane(splits_);
    while (!__all_sync(kAllLanes, has_told(own + split, count) && has_told(other + split, count))) {
    }
    __syncwarp();
  }

 private:
  static constexpr std::uint32_t kPiece = sizeof(Part::sums[0][0]);

  Part* parts_;          ///< of the team
  std::uint32_t* told_;  ///< by the team's warps
  Pieces pieces_;
  std::uint32_t kept_;  ///< shared memory: the lane's first own piece, if all were there
  std::uint32_t splits_;
  std::uint32_t rank_;
};

/// A consuming warpgroup; the query is on its way.
template <bool kWhole>
__device__ __forceinline__ void consume_once(const AttendParams& p, const Work& work, const AttendExchange& exchange,
                                             Shared& shared) {
  const std::uint32_t group = __shfl_sync(kAllLanes, threadIdx.x / kGroup, 0);
  const float scale = p.scale * kLog2OfE;
  Attention attention;
  ptx::wait_copies();
  ptx::fence_proxy_async();
  meet_aligned(kConsumersBarrier, kConsumers);
  const auto tiles = static_cast<std::uint32_t>(__shfl_sync(kAllLanes, shared.stretch.length, 0));
#pragma unroll 1
  for (std::uint32_t tile = 0; tile < tiles; ++tile) {
    attend_tile<kWhole>(scale, group, tile & 1U, shared, attention);
  }
  // Nobody reads the query any more: products are complete for all warps of a warpgroup at once, and the warpgroup
  // whose half was last has said with the weights that its logits are.
  const auto splits = static_cast<std::uint32_t>(p.splits);
  const Seat seat = seat_of(p, work, shared);
  const auto item = static_cast<std::int32_t>(seat.team);
  const std::int64_t row = query_row(p, work, item);
  if (splits == 1) {
    float sums[2];
    exchange_sums(attention, group, shared, sums);
    write_alone(attention, sums, Outputs(p, row, work.first_head(item)));
    return;
  }
  const SoleMeeting meeting(exchange, work, seat, splits, shared);
  float units[2];
  leave_sums(attention, meeting, units);
  const float sums[2] = {sum_of_head(attention.sum[0]), sum_of_head(attention.sum[1])};
  leave_shares(attention, sums, units, meeting.own_shares());
  meeting.meet();
  combine(p, row, work.first_head(item), meeting);
}

}  // namespace echo::mla
