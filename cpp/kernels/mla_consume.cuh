#pragma once
// The consuming warpgroups from query to output: tiles in turns, then the splits of the cluster put together.

#include <cstdint>

#include "kernels/mla_attend.cuh"
#include "kernels/mla_combine.cuh"
#include "kernels/mla_work.cuh"

namespace echo::mla {

/// Row of the pass.
__device__ __forceinline__ std::int64_t query_row(const AttendParams& p, const Work& work, std::int32_t item) {
  return static_cast<std::int64_t>(p.block.first) + work.row(item);
}

/// A consuming warpgroup; the first query is on its way.
__device__ __forceinline__ void consume(const AttendParams& p, const Work& work, const Split& split, std::int32_t first,
                                        Shared& shared) {
  const std::uint32_t group = __shfl_sync(kAllLanes, threadIdx.x / kGroup, 0);
  const auto splits = static_cast<std::uint32_t>(p.splits);
  const float scale = p.scale * 1.44269504F;  // to powers of two
  std::uint32_t parity = 0;
  std::uint32_t item_parity = 0;
  for (std::int32_t item = first; item < work.items; item += work.clusters) {
    ptx::wait_copies();
    ptx::fence_proxy_async();
    meet_aligned(kConsumersBarrier, kConsumers);
    const std::int32_t next = item + work.clusters;
    if (threadIdx.x == 0 && ptx::cluster_rank() == 0 && next < work.items) {
      prefetch_query(p, query_row(p, work, next), work.first_head(next));
    }
    Attention attention;
#pragma unroll 1
    for (std::int32_t tile = 0; tile < split.tiles; ++tile) {
      attend_tile(scale, group, parity, shared, attention);
      parity ^= 1U;
    }
    meet_aligned(kConsumersBarrier, kConsumers);  // nobody reads the second half or the query any more
    stage(attention, group, shared);
    __syncwarp();
    if (splits > 1 && static_cast<std::uint32_t>(lane_index()) < splits) {
      shared.staged.arrive_remote(static_cast<std::uint32_t>(lane_index()));
    }
    if (next < work.items) {  // not before: telling other blocks would wait for what is on its way
      load_query(p, query_row(p, work, next), work.first_head(next), shared);
    }
    if (splits > 1) {
      shared.staged.wait_cluster(item_parity);
    } else {
      meet_aligned(kConsumersBarrier, kConsumers);
    }
    combine(p, query_row(p, work, item), work.first_head(item), shared, ptx::cluster_rank(), splits);
    __syncwarp();
    // After the last item nobody waits for this, and a block that has left must not be told.
    if (next < work.items && static_cast<std::uint32_t>(lane_index()) < splits) {
      shared.drained.arrive_remote_relaxed(static_cast<std::uint32_t>(lane_index()));
    }
    item_parity ^= 1U;
  }
}

}  // namespace echo::mla
