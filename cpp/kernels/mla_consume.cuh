#pragma once
// The consuming warpgroups from query to output, where a team may have several items: tiles in turns, then the splits
// put together by their team. Items of which the team has only a part are taken over, or handed over.

#include <cstdint>

#include "kernels/mla_attend.cuh"
#include "kernels/mla_combine.cuh"
#include "kernels/mla_hand_over.cuh"
#include "kernels/mla_outputs.cuh"
#include "kernels/mla_work.cuh"

namespace echo::mla {

/// A consuming warpgroup; the first query is on its way. What is needed once per item is read anew for it: it would
/// take registers from the tiles.
template <bool kWhole>
__device__ __forceinline__ void consume(const AttendParams& p, const Work& work, const AttendExchange& exchange,
                                        Shared& shared) {
  const std::uint32_t group = __shfl_sync(kAllLanes, threadIdx.x / kGroup, 0);
  const auto splits = static_cast<std::uint32_t>(p.splits);
  const float scale = p.scale * kLog2OfE;
  const Stretch& stretch = shared.stretch;
  // Twice the tiles that are left of an item, and the parity of the next one: one register less.
  std::uint32_t left = 0;
  bool untold = false;
  for (std::int32_t item = stretch.first_item(); item != kNone; item = stretch.item_after(item)) {
    if (untold) {  // before waiting to be told: else teams with no item between would tell one after the other
      const Seat own = seat_of(p, work, shared);
      tell(running_sums(exchange, own.team, splits, own.rank));
      untold = false;
    }
    Attention attention;
    const Seat seat = seat_of(p, work, shared);
    take_over(stretch.first_tile(item) > 0, running_sums(exchange, seat.team - 1, splits, seat.rank), attention);
    ptx::wait_copies();
    ptx::fence_proxy_async();
    meet_aligned(kConsumersBarrier, kConsumers);
    if (threadIdx.x == 0 && stretch.item_after(item) != kNone && seat_of(p, work, shared).rank == 0) {
      const std::int32_t next = stretch.item_after(item);
      prefetch_query(p, query_row(p, work, next), work.first_head(next));
    }
#pragma unroll 1
    for (left += 2 * static_cast<std::uint32_t>(stretch.tiles_of(item)); left > 1; left = (left - 2) ^ 1U) {
      attend_tile<kWhole>(scale, group, left & 1U, shared, attention);
    }
    const auto load_next = [&] {
      const std::int32_t next = stretch.item_after(item);
      if (next != kNone) {
        load_query(p, query_row(p, work, next), work.first_head(next), shared);
      }
    };
    float sums[2];
    if (!stretch.ends(item)) {
      meet_aligned(kConsumersBarrier, kConsumers);  // nobody reads the query any more
      const Seat own = seat_of(p, work, shared);
      hand_over(attention, running_sums(exchange, own.team, splits, own.rank));
      untold = true;
      load_next();
    } else if (splits == 1) {
      exchange_sums(attention, group, shared, sums);
      load_next();
      write_alone(attention, sums, Outputs(p, query_row(p, work, item), work.first_head(item)));
    } else {
      const auto turn = static_cast<std::uint32_t>(stretch.ended_before(item)) % 2;
      const Meeting meeting(exchange, work, turn, seat_of(p, work, shared), splits);
      float units[2];
      leave_sums(attention, meeting, units);
      exchange_sums(attention, group, shared, sums);
      leave_shares(attention, sums, units, meeting.own_shares());
      meeting.tell();
      load_next();  // not before: telling other blocks would wait for what is on its way
      meeting.wait();
      combine(p, query_row(p, work, item), work.first_head(item), meeting);
    }
  }
}

}  // namespace echo::mla
