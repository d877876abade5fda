#pragma once
// A row that a cluster of blocks selects from, and what each block has in shared memory.

#include "kernels/ptx/barrier.cuh"
#include "kernels/select_gather.cuh"

namespace echo::top_k {

inline constexpr std::int32_t kLargestCluster = 16;

/// Sizes that the host chooses; the arrays follow Shared in this order.
struct Layout {
  std::int32_t capacity;  ///< entries of the list; while all scores are searched, the histogram of the cluster
  std::int32_t groups;    ///< of the bitmap, a multiple of 4
  std::int32_t bins;      ///< room for a histogram, and then for what is selected from a list

  std::size_t bytes() const;
};

struct alignas(16) Shared {
  ListSearch search;
  Scan scan;
  std::uint32_t bounds[kListWarps];
  ptx::Mbarrier filled;    ///< the first block's: the list is complete
  ptx::Mbarrier answered;  ///< the others': `do_search` is there
  std::uint64_t do_search;
  std::int32_t listed;  ///< tokens in the first block's list, or that should be there
  Counts counts[kLargestCluster];
};

inline std::size_t Layout::bytes() const {
  return sizeof(Shared) + static_cast<std::size_t>(capacity) * sizeof(std::uint64_t) +
         static_cast<std::size_t>(bins) * sizeof(std::int32_t) +
         static_cast<std::size_t>(groups) * (sizeof(std::uint64_t) + sizeof(std::uint16_t));
}

/// Shared memory of a block.
struct Memory {
  Shared& shared;
  std::uint64_t* entries;
  std::int32_t capacity;
  std::int32_t* histogram;
  Bitmap bitmap;

  __device__ Memory(std::byte* begin, const Layout& layout)
      : shared(*reinterpret_cast<Shared*>(begin)),
        entries(reinterpret_cast<std::uint64_t*>(begin + sizeof(Shared))),
        capacity(layout.capacity),
        histogram(reinterpret_cast<std::int32_t*>(entries + layout.capacity)),
        bitmap{reinterpret_cast<std::uint64_t*>(histogram + layout.bins),
               reinterpret_cast<std::uint16_t*>(histogram + layout.bins + 2 * layout.groups), layout.groups} {}

  /// What a search in a list finds cleared.
  __device__ void clear_for_list() const {
    if (threadIdx.x == 0) {
      shared.search.few_count = 0;
    }
    bitmap.clear();
    clear<kListThreads>(histogram);
  }
  __device__ std::int32_t* cluster_histogram() const { return reinterpret_cast<std::int32_t*>(entries); }
};

/// A row that selects from at least k tokens, and this block's place in its cluster.
struct Row {
  const float* scores;
  std::int32_t length;
  std::int32_t k;
  std::int32_t* selection;
  float* kth_score;
  std::uint32_t rank;
  std::uint32_t blocks;

  /// Of this block; begins at a multiple of 16 bytes.
  __device__ Part part() const {
    const auto count = static_cast<std::int32_t>(blocks);
    const std::int32_t size = (length + count * kVectorScores - 1) / (count * kVectorScores) * kVectorScores;
    const std::int32_t begin = min(static_cast<std::int32_t>(rank) * size, length);
    return {begin, min(begin + size, length)};
  }
};

}  // namespace echo::top_k
