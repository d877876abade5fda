#pragma once
// The consuming warpgroups from query to output: tiles in turns, then the splits of the cluster put together.

#include <cstdint>

#include "kernels/mla_attend.cuh"
#include "kernels/mla_combine.cuh"
#include "kernels/mla_hand_over.cuh"
#include "kernels/mla_work.cuh"

namespace echo::mla {

/// Row of the pass.
__device__ __forceinline__ std::int64_t query_row(const AttendParams& p, const Work& work, std::int32_t item) {
  return static_cast<std::int64_t>(p.block.first) + work.row(item);
}

/// A consuming warpgroup; the first query is on its way.
__device__ __forceinline__ void consume(const AttendParams& p, const Work& work, const Stretch& stretch,
                                        const Handing& handing, Shared& shared) {
  const std::uint32_t group = __shfl_sync(kAllLanes, threadIdx.x / kGroup, 0);
  const auto splits = static_cast<std::uint32_t>(p.splits);
  const float scale = p.scale * 1.44269504F;  // to powers of two
  std::uint32_t parity = 0;
  bool untold = false;
  for (std::int32_t item = stretch.first_item(); item != kNone;) {
    Attention attention;
    if (stretch.first_tile(item) > 0) {
      take_over(handing.sums(p, stretch.number - 1, ptx::cluster_rank()), attention);
    }
    ptx::wait_copies();
    ptx::fence_proxy_async();
    meet_aligned(kConsumersBarrier, kConsumers);
    if (untold) {
      tell(handing.sums(p, stretch.number, ptx::cluster_rank()));
      untold = false;
    }
    if (threadIdx.x == 0 && ptx::cluster_rank() == 0 && stretch.item_after(item) != kNone) {
      prefetch_query(p, query_row(p, work, stretch.item_after(item)), work.first_head(stretch.item_after(item)));
    }
#pragma unroll 1
    for (std::int32_t left = stretch.tiles_of(item); left > 0; --left) {
      attend_tile(scale, group, parity, shared, attention);
      parity ^= 1U;
    }
    meet_aligned(kConsumersBarrier, kConsumers);  // nobody reads the second half or the query any more
    const bool ends = stretch.ends(item);
    if (ends) {
      stage(attention, group, shared);
      __syncwarp();
      if (splits > 1 && static_cast<std::uint32_t>(lane_index()) < splits) {
        shared.staged.arrive_remote(static_cast<std::uint32_t>(lane_index()));
      }
    } else {
      hand_over(attention, handing.sums(p, stretch.number, ptx::cluster_rank()));
      untold = true;
    }
    const std::int32_t next = stretch.item_after(item);
    if (next != kNone) {  // not before: telling other blocks would wait for what is on its way
      load_query(p, query_row(p, work, next), work.first_head(next), shared);
    }
    if (ends) {
      if (splits > 1) {
        shared.staged.wait_cluster(static_cast<std::uint32_t>(stretch.ended_before(item)) & 1U);
      } else {
        meet_aligned(kConsumersBarrier, kConsumers);
      }
      combine(p, query_row(p, work, item), work.first_head(item), shared, ptx::cluster_rank(), splits);
      __syncwarp();
    }
    // After the last item nobody waits for this, and a block that has left must not be told.
    if (next != kNone && static_cast<std::uint32_t>(lane_index()) < splits) {
      shared.drained.arrive_remote_relaxed(static_cast<std::uint32_t>(lane_index()));
    }
    item = next;
  }
}

}  // namespace echo::mla
