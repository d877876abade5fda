#pragma once
// Selection of a row by a cluster: from score's list, from one that the cluster makes, or from all scores.
//
// The first block has the list. Others reserve places in it, store there, and count what they stored on a barrier of
// the first block, which then knows that all has arrived: no fence, and no barrier of the cluster, whose wait for all
// writes takes a microsecond. The others stay until they are told that they are not needed for a search.

#include "kernels/ptx/cluster.cuh"
#include "kernels/select_search.cuh"
#include "kernels/select_sifted.cuh"

namespace echo::top_k {

/// Lists, in the first block, the tokens of the row that reach a bound, which it finds.
__device__ inline void list_row(const Row& row, const Memory& memory, std::uint32_t& bound) {
  Shared& shared = memory.shared;
  const Part part = row.part();
  const ClusterList list{memory.entries, &shared.listed, &shared.filled, memory.capacity, row.rank == 0};
  if (row.length <= memory.capacity) {
    bound = 0U;
    if (threadIdx.x == 0 && row.rank == 0) {
      shared.listed = row.length;
    }
    list_all(row.scores, part, list);
    return;
  }
  const Sampling sampling = sampling_of(row.length, row.k);
  const Best best = sample(row.scores, row.length, sampling);
  Batch batch;
  batch.load(row.scores, part.begin, part.end);
  bound = bound_of(best, sampling.rank, shared.bounds);
  list_part(batch, row.scores, part, value_of_key(bound), list);
}

/// Whether the list does not do, so that all scores have to be searched. The first block finds out and tells the
/// others; it has the whole list then.
__device__ inline bool has_to_search(const Row& row, const Memory& memory) {
  Shared& shared = memory.shared;
  if (row.rank != 0) {
    shared.answered.wait_cluster(0);
    return shared.do_search != 0U;
  }
  shared.filled.wait_cluster(0);
  const bool search = shared.listed < row.k || shared.listed > memory.capacity;
  if (threadIdx.x > 0 && threadIdx.x < row.blocks) {
    ptx::store_async(&shared.do_search, threadIdx.x, search ? 1U : 0U, shared.answered);
  }
  return search;
}

/// What blocks have to find in each other's memory before they write there.
__device__ inline void prepare(Shared& shared, std::uint32_t rank, std::uint32_t blocks) {
  if (threadIdx.x == 0) {
    shared.listed = 0;
    shared.filled.init(blocks * kListWarps);
    shared.answered.init(1);
    ptx::fence_mbarrier_init();
    if (rank != 0) {
      shared.answered.arrive_remote_expecting(rank, sizeof(shared.do_search));
    }
    ptx::cluster_fence();
  }
  __syncwarp();
  ptx::cluster_arrive();
}

/// Selects from a list in the first block, which has all of the top-k. What it finds cleared: clear_for_list.
__device__ inline void select_listed(const Row& row, const List& list, std::uint32_t bound, const Memory& memory) {
  Shared& shared = memory.shared;
  const std::uint64_t least =
      mark_largest(list, row.k, bound, memory.bitmap, shared.search, shared.scan, memory.histogram);
  if (threadIdx.x == 0) {
    *row.kth_score = value_of_key(key_of(least));
  }
  write_marked(list, least, memory.bitmap, row.length, row.k, shared.scan.sums, memory.histogram, row.selection);
}

__device__ inline void add_to(std::int64_t& counter, std::int32_t count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(count));
}

}  // namespace echo::top_k
