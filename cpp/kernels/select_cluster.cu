// select on GPUs with clusters: a cluster of blocks per row puts together a short list of tokens that has all of the
// top-k, and the first block selects from it (select_list.cuh).
//
// The list is score's, where it has one for the row that is known to be whole; then the other blocks leave at once.
// Else each block finds the same bound from a sample of the row (select_gather.cuh), lists what reaches it in its part
// and adds that to the first block's list, over distributed shared memory: one read of the scores. If the list comes
// out too short or too long (many ties, or scores that the sample says nothing about), the cluster searches all
// scores: is the bound the k-th score itself? Else three digits as in select.cu, from histograms over the
// cluster; then blocks count and write their parts in order. Bits do not depend on the way taken.
// Shared memory: the list (64 KB for k up to 2048), a bit per position, two histograms; one block per multiprocessor.
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

constexpr std::int32_t kLargestCluster = 16;
constexpr std::int32_t kLargestK = 2 * kBins;  ///< what fits into the histograms, sorted

/// Sizes that the host chooses; the arrays follow Shared in this order.
struct Layout {
  std::int32_t capacity;  ///< entries of the list
  std::int32_t groups;    ///< of the bitmap

  std::size_t bytes() const;
};

struct alignas(16) Shared {
  std::int32_t histograms[2][kBins];  ///< this block's, the cluster's; in the end the sorted selection
  ListSearch search;
  Scan scan;
  std::int32_t listed;  ///< tokens in the list, or that should be there
  std::int32_t first;   ///< place of this block's tokens in the first block's list
  Counts counts[kLargestCluster];

  __device__ std::int32_t* sorted() { return histograms[0]; }
};
static_assert(sizeof(Shared::histograms) >= kLargestK * sizeof(std::int32_t));

std::size_t Layout::bytes() const {
  const auto per_group = sizeof(std::uint16_t) + kGroupWords * sizeof(std::uint32_t);
  return sizeof(Shared) + static_cast<std::size_t>(capacity) * sizeof(std::uint64_t) +
         static_cast<std::size_t>(groups) * per_group;
}

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
  static constexpr std::int32_t kEarly = 4;  ///< of a thread

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

  __device__ void list(std::int32_t length, std::uint64_t* entries) const {
#pragma unroll
    for (std::int32_t i = 0; i < kEarly; ++i) {
      const std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + i * kThreads;
      if (at < found) {
        entries[at] = entry(early[i], length);
      }
    }
    for (std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + kEarly * kThreads; at < found; at += kThreads) {
      entries[at] = entry(tokens[at], length);
    }
  }

 private:
  __device__ static std::uint64_t entry(ScoredToken token, std::int32_t length) {
    return entry_of(token.key, max(0, min(token.position, length - 1)));
  }
};

/// Finds a bound and lists, in the first block, all tokens of the row that reach it. Returns how many there are, and in
/// `bound` the key that they reach. Ends with a barrier of the cluster half passed: the first block has to wait for it.
__device__ std::int32_t list_row(const Row& row, Shared& shared, const List& list, std::uint32_t& bound) {
  if (threadIdx.x == 0) {
    shared.listed = 0;
  }
  const Part part = row.part();
  Batch batch;
  batch.load(row.scores, part.begin, part.end);
  Bound reach{0.0F, true};
  bound = 0U;
  if (row.length > list.capacity) {
    const int strata_bits = strata_bits_of(row.length);
    const std::int32_t samples = 2 << strata_bits;
    sample(row.scores, row.length, strata_bits, list.entries);
    __syncthreads();
    const std::uint64_t least = kth_largest(list.entries, samples, bound_rank(samples, row.length, row.k),
                                            shared.search, shared.scan, shared.histograms[0]);
    bound = key_of(least);
    reach = {value_of_key(bound), false};
  }
  __syncthreads();
  ptx::cluster_release();  // this block's list begins; it held the sample before
  list_part(batch, row.scores, part, reach, list);
  ptx::cluster_acquire();
  if (row.rank != 0) {
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.first = atomicAdd(ptx::of_block(list.count, 0), *list.count);
    }
    __syncthreads();
    std::uint64_t* common = ptx::of_block(list.entries, 0);
    const std::int32_t count = min(*list.count, list.capacity - shared.first);
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
      common[shared.first + i] = list.entries[i];
    }
  }
  ptx::cluster_sync();
  const std::int32_t listed = *ptx::of_block(list.count, 0);
  ptx::cluster_release();
  return listed;
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
__device__ const std::int32_t* merged_histogram(const Row& row, Shared& shared, int shift, std::uint32_t digit_mask,
                                                std::uint32_t known, std::uint32_t mask) {
  clear(shared.histograms[0]);
  __syncthreads();
  count_digits(row.scores, row.part(), known, mask, shift, digit_mask, shared.histograms[0]);
  ptx::cluster_sync();
  const std::uint32_t bins = kBins / row.blocks;
  for (std::uint32_t i = threadIdx.x; i < bins; i += kThreads) {
    const std::uint32_t bin = row.rank * bins + i;
    std::int32_t sum = 0;
    for (std::uint32_t rank = 0; rank < row.blocks; ++rank) {
      sum += *ptx::of_block(&shared.histograms[0][bin], rank);
    }
    for (std::uint32_t rank = 0; rank < row.blocks; ++rank) {
      *ptx::of_block(&shared.histograms[1][bin], rank) = sum;
    }
  }
  ptx::cluster_sync();
  return shared.histograms[1];
}

/// Selects from all scores. `guess`: a key that may be the k-th.
__device__ void search_all(const Row& row, std::uint32_t guess, Shared& shared) {
  const Part part = row.part();
  Cut cut{guess, 0};
  Counts own{};
  Counts total{};
  Counts in_block = count_taken(row.scores, part, guess, own, shared.scan.sums);
  Counts in_row = exchange(row, own, total, shared);
  cut.equal = row.k - total.larger;
  if (cut.equal < 1 || cut.equal > total.equal) {
    cut =
        find_cut(row.k, shared.scan, [&](int shift, std::uint32_t digit_mask, std::uint32_t known, std::uint32_t mask) {
          return merged_histogram(row, shared, shift, digit_mask, known, mask);
        });
    in_block = count_taken(row.scores, part, cut.key, own, shared.scan.sums);
    in_row = exchange(row, own, total, shared);
  }
  const Counts before{in_row.larger + in_block.larger, in_row.equal + in_block.equal};
  write_taken(row.scores, part, cut, before, row.selection);
  if (row.rank == 0 && threadIdx.x == 0) {
    *row.kth_score = value_of_key(cut.key);
  }
}

__device__ void select_row(const Row& row, const Sifted& sifted, bool whole, const Layout& layout, std::byte* memory) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  auto* entries = reinterpret_cast<std::uint64_t*>(memory + sizeof(Shared));
  auto* words = reinterpret_cast<std::uint32_t*>(entries + layout.capacity);
  const Bitmap bitmap{words, reinterpret_cast<std::uint16_t*>(words + layout.groups * kGroupWords),
                      (row.length + kGroupBits - 1) / kGroupBits};
  if (row.rank == 0) {
    bitmap.clear();
  }
  std::int32_t listed = sifted.found;
  if (whole) {
    sifted.list(row.length, entries);
    __syncthreads();
  } else {
    std::uint32_t bound = 0;
    listed = list_row(row, shared, {entries, &shared.listed, layout.capacity}, bound);
    if (listed < row.k || listed > layout.capacity) {
      ptx::cluster_acquire();
      return search_all(row, bound, shared);
    }
    if (row.rank != 0) {
      return;
    }
  }
  const std::uint64_t least = kth_largest(entries, listed, row.k, shared.search, shared.scan, shared.histograms[0]);
  write_in_order(entries, listed, least, row.k, bitmap, shared.scan.sums, shared.sorted(), row.selection);
  if (threadIdx.x == 0) {
    *row.kth_score = value_of_key(key_of(least));
  }
  if (!whole) {
    ptx::cluster_acquire();  // all blocks have read from this one's shared memory
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
                .blocks = ptx::cluster_size()};
  const bool whole = sifted.whole(row, min(p.sift.capacity, layout.capacity));
  if (p.sift.rows != nullptr && p.counters != nullptr && rank == 0 && threadIdx.x == 0 && length > 0) {
    add_to(p.counters->candidates, sifted.found);
    add_to(p.counters->full_selects, length >= k && !whole ? 1 : 0);
  }
  if (length >= k && (rank == 0 || !whole)) {
    select_row(row, sifted, whole, layout, memory);
  } else if (length < k && rank == 0) {
    write_all(length, k, row.selection);
  }
#endif
}

constexpr std::size_t kSharedBytes = 227 * 1024;

/// The largest list that fits beside the bitmap, at least twice k; a capacity of 0: none does.
Layout layout_of(const SelectParams& params) {
  const std::int32_t k = params.shape.top_k;
  const std::int64_t groups = (params.score_stride + kGroupBits - 1) / kGroupBits;
  if (k > kLargestK || groups * static_cast<std::int64_t>(sizeof(uint4)) > static_cast<std::int64_t>(kSharedBytes)) {
    return {};
  }
  for (const std::int32_t capacity : {16384, 8192}) {
    const Layout layout{capacity, static_cast<std::int32_t>(groups)};
    if ((capacity == 8192 || 4 * k > 8192) && layout.bytes() <= kSharedBytes) {
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
