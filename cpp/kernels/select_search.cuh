#pragma once
// The search of all scores by a cluster, where no short list has the top-k. One pass tells whether a guess is the k-th
// key; three count digits, in histograms that are added up over the cluster; then each block counts and writes what is
// taken from its part. Cost: 2 or 7 reads of the part, as many barriers of the cluster.

#include "kernels/ptx/cluster.cuh"
#include "kernels/select_memory.cuh"

namespace echo::top_k {

/// Tells all blocks what each has; returns what the blocks before this one have, `total` becomes that of all.
__device__ inline Counts exchange(const Row& row, Counts own, Counts& total, Shared& shared) {
  if (threadIdx.x < row.blocks) {
    *ptx::of_block(&shared.counts[row.rank], threadIdx.x) = own;
  }
  ptx::cluster_sync();
  Counts before{0, 0};
  total = {0, 0};
  for (std::uint32_t rank = 0; rank < row.blocks; ++rank) {
    const Counts counts = shared.counts[rank];
    before = rank < row.rank ? Counts{before.larger + counts.larger, before.equal + counts.equal} : before;
    total = {total.larger + counts.larger, total.equal + counts.equal};
  }
  return before;
}

/// The histogram of a digit over the whole row: each block adds up a part of the bins and tells all others.
__device__ inline const std::int32_t* merged_histogram(const Row& row, const Memory& memory, int shift,
                                                       std::uint32_t digit_mask, std::uint32_t known,
                                                       std::uint32_t mask) {
  clear<kListThreads>(memory.histogram);
  __syncthreads();
  count_digits<kListThreads>(row.scores, row.part(), known, mask, shift, digit_mask, memory.histogram);
  ptx::cluster_sync();
  const std::uint32_t bins = kBins / row.blocks;
  for (std::uint32_t i = threadIdx.x; i < bins; i += kListThreads) {
    const std::uint32_t bin = row.rank * bins + i;
    std::int32_t sum = 0;
    for (std::uint32_t rank = 0; rank < row.blocks; ++rank) {
      sum += *ptx::of_block(memory.histogram + bin, rank);
    }
    for (std::uint32_t rank = 0; rank < row.blocks; ++rank) {
      *ptx::of_block(memory.cluster_histogram() + bin, rank) = sum;
    }
  }
  ptx::cluster_sync();
  return memory.cluster_histogram();
}

/// Selects from all scores. `guess`: a key that may be the k-th.
__device__ inline void search_all(const Row& row, std::uint32_t guess, const Memory& memory) {
  Shared& shared = memory.shared;
  const Part part = row.part();
  Cut cut{guess, 0};
  Counts own{};
  Counts total{};
  Counts in_block = count_taken<kListThreads>(row.scores, part, guess, own, shared.scan.sums);
  Counts in_row = exchange(row, own, total, shared);
  cut.equal = row.k - total.larger;
  if (cut.equal < 1 || cut.equal > total.equal) {
    const auto histogram = [&](int shift, std::uint32_t digit_mask, std::uint32_t known, std::uint32_t mask) {
      return merged_histogram(row, memory, shift, digit_mask, known, mask);
    };
    cut = find_cut<kListThreads>(row.k, shared.scan, histogram);
    in_block = count_taken<kListThreads>(row.scores, part, cut.key, own, shared.scan.sums);
    in_row = exchange(row, own, total, shared);
  }
  const Counts before{in_row.larger + in_block.larger, in_row.equal + in_block.equal};
  write_taken<kListThreads>(row.scores, part, cut, before, row.selection);
  if (row.rank == 0 && threadIdx.x == 0) {
    *row.kth_score = value_of_key(cut.key);
  }
}

}  // namespace echo::top_k
