// select on GPUs with clusters: a cluster of blocks per row puts together a short list of tokens that has all of the
// top-k, and the first block selects from it (select_list.cuh).
//
// The list is score's, where it has one for the row that is known to be whole; then the other blocks leave at once.
// Else each block finds the same bound from a sample of the row (select_gather.cuh) and adds what reaches it in its
// part to the first block's list, over distributed shared memory: one read of the scores. If the list comes out too
// short or too long (many ties, or scores that the sample says nothing about), the cluster searches all scores: is the
// bound the k-th score itself? Else three digits as in select.cu, from histograms over the cluster; then blocks count
// and write their parts in order. Bits do not depend on the way taken.
// Shared memory: the list (64 KB for k up to 2048), 10 bits per 8 positions, a histogram.
#include "kernels/select_cluster.hpp"

#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/select_gather.cuh"
#include "kernels/step_rows.cuh"

namespace echo {
namespace {

using namespace top_k;

constexpr int kThreads = kListThreads;
constexpr std::int32_t kLargestCluster = 16;
constexpr std::int32_t kLargestK = 4096;

/// Sizes that the host chooses; the arrays follow Shared in this order.
struct Layout {
  std::int32_t capacity;  ///< entries of the list; while all scores are searched, the histogram of the cluster
  std::int32_t groups;    ///< of the bitmap
  std::int32_t sorted;    ///< words of the block's histogram, or of the sorted selection

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

std::size_t Layout::bytes() const {
  constexpr std::size_t kPerGroup = sizeof(std::uint64_t) + sizeof(std::uint16_t);
  return sizeof(Shared) + static_cast<std::size_t>(capacity) * sizeof(std::uint64_t) +
         static_cast<std::size_t>(sorted) * sizeof(std::int32_t) + static_cast<std::size_t>(groups) * kPerGroup;
}

/// Shared memory of a block.
struct Memory {
  Shared& shared;
  std::uint64_t* entries;
  std::int32_t capacity;
  std::int32_t* histogram;
  Bitmap bitmap;

  __device__ Memory(std::byte* begin, const Layout& layout, std::int32_t length)
      : shared(*reinterpret_cast<Shared*>(begin)),
        entries(reinterpret_cast<std::uint64_t*>(begin + sizeof(Shared))),
        capacity(layout.capacity),
        histogram(reinterpret_cast<std::int32_t*>(entries + layout.capacity)) {
    auto* groups = reinterpret_cast<std::uint64_t*>(histogram + layout.sorted);
    const std::int32_t used = (length + kGroupBits - 1) / kGroupBits;
    bitmap = {groups, reinterpret_cast<std::uint16_t*>(groups + layout.groups),
              (used + Bitmap::kOwn - 1) / Bitmap::kOwn * Bitmap::kOwn};
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

/// What score left for a row; `found` is 0 without sifting. Loads its first tokens before it is known how many there
/// are, so that all is one wait.
struct Sifted {
  static constexpr std::int32_t kEarly = 8;  ///< of a thread

  const ScoredToken* tokens = nullptr;
  std::uint64_t bounds = 0;
  std::int32_t compared = 0;
  std::int32_t found = 0;
  ScoredToken early[kEarly];

  __device__ Sifted(const SiftView& sift, std::int64_t index, bool with_tokens) {
    if (sift.rows == nullptr) {
      return;
    }
    tokens = sift.tokens + index * sift.capacity;
    const RowSift& row = sift.rows[index];
    bounds = row.bounds;
    compared = row.compared;
    found = row.found;
#pragma unroll
    for (std::int32_t i = 0; i < kEarly; ++i) {
      const std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + i * kThreads;
      early[i] = with_tokens && at < sift.capacity ? tokens[at] : ScoredToken{0U, 0};
    }
  }

  /// Whether the tokens have all of the top-k.
  __device__ bool whole(const Row& row, std::int32_t capacity) const {
    return bounds != 0U && compared == row.length && found >= row.k && found <= capacity;
  }

  /// Lists the tokens and counts them by coarse bins.
  __device__ void list(std::int32_t length, std::uint64_t* entries, std::int32_t* histogram) const {
    const auto bound = static_cast<std::uint32_t>(bounds);
#pragma unroll
    for (std::int32_t i = 0; i < kEarly; ++i) {
      const std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + i * kThreads;
      if (at < found) {
        entries[at] = entry(early[i], length);
        atomicAdd(histogram + coarse_bin(early[i].key - bound), 1);
      }
    }
#pragma unroll 1
    for (std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + kEarly * kThreads; at < found; at += kThreads) {
      entries[at] = entry(tokens[at], length);
      atomicAdd(histogram + coarse_bin(tokens[at].key - bound), 1);
    }
  }

 private:
  __device__ static std::uint64_t entry(ScoredToken token, std::int32_t length) {
    return entry_of(token.key, max(0, min(token.position, length - 1)));
  }
};

/// Lists, in the first block, the tokens of the row that reach a bound, which it finds.
__device__ void list_row(const Row& row, const Memory& memory, std::uint32_t& bound) {
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
__device__ bool has_to_search(const Row& row, const Memory& memory) {
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

/// Tells all blocks what each has; returns what the blocks before this one have, `total` becomes that of all.
__device__ Counts exchange(const Row& row, Counts own, Counts& total, Shared& shared) {
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
__device__ const std::int32_t* merged_histogram(const Row& row, const Memory& memory, int shift,
                                                std::uint32_t digit_mask, std::uint32_t known, std::uint32_t mask) {
  clear<kThreads>(memory.histogram);
  __syncthreads();
  count_digits<kThreads>(row.scores, row.part(), known, mask, shift, digit_mask, memory.histogram);
  ptx::cluster_sync();
  const std::uint32_t bins = kBins / row.blocks;
  for (std::uint32_t i = threadIdx.x; i < bins; i += kThreads) {
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
__device__ void search_all(const Row& row, std::uint32_t guess, const Memory& memory) {
  Shared& shared = memory.shared;
  const Part part = row.part();
  Cut cut{guess, 0};
  Counts own{};
  Counts total{};
  Counts in_block = count_taken<kThreads>(row.scores, part, guess, own, shared.scan.sums);
  Counts in_row = exchange(row, own, total, shared);
  cut.equal = row.k - total.larger;
  if (cut.equal < 1 || cut.equal > total.equal) {
    const auto histogram = [&](int shift, std::uint32_t digit_mask, std::uint32_t known, std::uint32_t mask) {
      return merged_histogram(row, memory, shift, digit_mask, known, mask);
    };
    cut = find_cut<kThreads>(row.k, shared.scan, histogram);
    in_block = count_taken<kThreads>(row.scores, part, cut.key, own, shared.scan.sums);
    in_row = exchange(row, own, total, shared);
  }
  const Counts before{in_row.larger + in_block.larger, in_row.equal + in_block.equal};
  write_taken<kThreads>(row.scores, part, cut, before, row.selection);
  if (row.rank == 0 && threadIdx.x == 0) {
    *row.kth_score = value_of_key(cut.key);
  }
}

/// What blocks have to find in each other's memory before they write there.
__device__ void prepare(Shared& shared, std::uint32_t rank, std::uint32_t blocks) {
  if (threadIdx.x == 0) {
    shared.listed = 0;
    shared.search.few_count = 0;
    shared.filled.init(blocks * kListWarps);
    shared.answered.init(1);
    ptx::fence_mbarrier_init();
    if (rank != 0) {
      ptx::arrive_expecting(shared.answered, rank, sizeof(shared.do_search));
    }
    ptx::cluster_fence();
  }
  __syncwarp();
  ptx::cluster_arrive();
}

__device__ void select_row(const Row& row, const Sifted& sifted, bool whole, const Memory& memory) {
  Shared& shared = memory.shared;
  if (row.rank == 0) {
    memory.bitmap.clear();
    clear<kThreads>(memory.histogram);
  }
  std::int32_t listed = sifted.found;
  auto bound = static_cast<std::uint32_t>(sifted.bounds);
  if (whole) {
    __syncthreads();
    sifted.list(row.length, memory.entries, memory.histogram);
  } else {
    list_row(row, memory, bound);
    if (has_to_search(row, memory)) {
      return search_all(row, bound, memory);
    }
    if (row.rank != 0) {
      return;
    }
    listed = shared.listed;
    count_list(memory.entries, listed, bound, memory.histogram);
  }
  __syncthreads();
  const std::uint64_t least =
      mark_largest(memory.entries, listed, row.k, bound, memory.bitmap, shared.search, shared.scan, memory.histogram);
  write_in_order(memory.entries, listed, least, row.k, memory.bitmap, shared.scan.sums, memory.histogram,
                 row.selection);
  if (threadIdx.x == 0) {
    *row.kth_score = value_of_key(key_of(least));
  }
}

__device__ void add_to(std::int64_t& counter, std::int32_t count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(count));
}

__global__ __launch_bounds__(kThreads, 1) void select_cluster(const __grid_constant__ SelectParams p,
                                                              const __grid_constant__ Layout layout,
                                                              const __grid_constant__ KernelErrorView errors) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) std::byte memory[];
  const auto index = static_cast<std::int32_t>(ptx::cluster_index());
  const std::uint32_t rank = ptx::cluster_rank();
  const std::uint32_t blocks = ptx::cluster_size();
  prepare(*reinterpret_cast<Shared*>(memory), rank, blocks);
  const Sifted sifted(p.sift, index, rank == 0);
  const std::int32_t k = p.shape.top_k;
  const std::int32_t row_index = p.block.first + index;
  std::int32_t length = position_of(p.step, row_index, errors) + 1;
  if (length > p.score_stride) {
    errors.raise(KernelError::bad_position);
    length = 0;
  }
  const Row row{.scores = p.scores + index * p.score_stride,
                .length = length,
                .k = k,
                .selection = p.selection + static_cast<std::int64_t>(row_index) * k,
                .kth_score = p.kth_score + row_index,
                .rank = rank,
                .blocks = blocks};
  const bool whole = sifted.whole(row, min(p.sift.capacity, layout.capacity));
  ptx::cluster_wait();
  if (p.sift.rows != nullptr && p.counters != nullptr && rank == 0 && threadIdx.x == 0 && length > 0) {
    add_to(p.counters->candidates, sifted.found);
    add_to(p.counters->full_selects, length >= k && !whole ? 1 : 0);
  }
  if (length >= k && (rank == 0 || !whole)) {
    select_row(row, sifted, whole, {memory, layout, length});
  } else if (length < k && rank == 0) {
    write_all<kThreads>(length, k, row.selection);
  }
#endif
}

constexpr std::size_t kSharedBytes = 227 * 1024;

/// Room for 4 k tokens or what fits beside the bitmap, at least 2 k; a capacity of 0: that does not fit.
Layout layout_of(const SelectParams& params) {
  const std::int32_t k = params.shape.top_k;
  constexpr std::int64_t kStep = kGroupBits * Bitmap::kOwn;
  const std::int64_t groups = (params.score_stride + kStep - 1) / kStep * Bitmap::kOwn;
  if (k > kLargestK || groups > static_cast<std::int64_t>(kSharedBytes / sizeof(std::uint64_t))) {
    return {};
  }
  for (std::int32_t capacity = std::max(8192, 4 * k); capacity >= std::max(2 * k, kBins); capacity -= 1024) {
    const Layout layout{capacity, static_cast<std::int32_t>(groups), std::max(k, kBins)};
    if (layout.bytes() <= kSharedBytes) {
      return layout;
    }
  }
  return {};
}

/// A launch of a cluster of so many blocks per row.
struct ClusterLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  ClusterLaunch(std::int32_t blocks, std::int32_t rows, std::size_t shared_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(blocks) * static_cast<unsigned>(rows));
    config.blockDim = kThreads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

int clusters_at_once(std::int32_t blocks) {
  const ClusterLaunch launch(blocks, 1, kSharedBytes, nullptr);
  int clusters = 0;
  ECHO_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, select_cluster, &launch.config));
  return clusters;
}

/// As many blocks per row as run at once, but parts of some size.
std::int32_t blocks_per_row(const SelectParams& params, const SelectClusterPlan& plan, int multiprocessors) {
  constexpr std::int64_t kSmallestPart = 4096;
  constexpr std::int64_t kLargestPart = 32768;  // of 8 blocks; longer rows get 16
  const std::int64_t rows = params.block.count;
  std::int32_t blocks = 1;
  while (blocks < 8 && 2 * blocks * rows <= multiprocessors && params.score_stride >= 2 * blocks * kSmallestPart) {
    blocks *= 2;
  }
  const bool long_rows = blocks == 8 && params.score_stride >= 8 * kLargestPart;
  return long_rows && rows <= plan.clusters_of_16 ? 16 : std::min(blocks, plan.largest_cluster);
}

}  // namespace

SelectClusterPlan plan_select_cluster(int device) {
  int major = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  cudaFuncAttributes attributes{};
  const auto* kernel = reinterpret_cast<const void*>(select_cluster);
  ECHO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  if (major < 9 || attributes.binaryVersion < 90) {
    return {};
  }
  int shared_bytes = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (shared_bytes < static_cast<int>(kSharedBytes)) {
    return {};
  }
  ECHO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  ECHO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  SelectClusterPlan plan;
  for (const std::int32_t blocks : {1, 2, 4, 8}) {
    plan.largest_cluster = clusters_at_once(blocks) > 0 ? blocks : plan.largest_cluster;
  }
  plan.clusters_of_16 = clusters_at_once(16);
  return plan;
}

bool fits_select_cluster(const SelectParams& params, const SelectClusterPlan& plan) {
  return plan.largest_cluster > 0 && params.shape.top_k > 0 && layout_of(params).capacity > 0 &&
         params.score_stride % kVectorScores == 0 &&
         reinterpret_cast<std::uintptr_t>(params.scores) % sizeof(float4) == 0;
}

void launch_select_cluster(const SelectParams& params, const SelectClusterPlan& plan, const LaunchContext& context) {
  if (params.block.count == 0) {
    return;
  }
  const Layout layout = layout_of(params);
  const std::int32_t blocks = blocks_per_row(params, plan, context.multiprocessors);
  const ClusterLaunch launch(blocks, params.block.count, layout.bytes(), context.stream);
  ECHO_CUDA_CHECK(cudaLaunchKernelEx(&launch.config, select_cluster, params, layout, context.errors));
}

}  // namespace echo
