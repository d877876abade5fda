// select on GPUs with clusters: a cluster of blocks per row puts together a short list of tokens that has all of the
// top-k, and the first block selects from it (select_list.cuh).
//
// The list is score's, where it has one for the row that is known to be whole; then the other blocks leave at once.
// Else each block finds the same bound from a sample of the row (select_gather.cuh) and adds what reaches it in its
// part to the first block's list, over distributed shared memory: one read of the scores. If the list comes out too
// short or too long (many ties, or scores that the sample says nothing about), the cluster searches all scores: is the
// bound the k-th score itself? Else three digits as in select.cu, from histograms over the cluster; then blocks count
// and write their parts in order. Bits do not depend on the way taken.
// Shared memory: the list (64 KB for k up to 2048), 10 bytes per 64 positions, a histogram.
// Cost on an H200, k = 2048 of 102,400 scores: 11.2 us for a row, 11.9 for 13, 24 for 102; from score's list of 1.5 k
// tokens 5.4, 5.9 and 6.4. An empty kernel of this grid takes 0.6, one that loads a list and writes as many positions
// 1.4. The rest is spent step by step by one multiprocessor; docs/measurements/select.md has how long each takes.
#include "kernels/select_cluster.hpp"

#include <algorithm>
#include <cstddef>

#include "kernels/launch.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/select_near.cuh"
#include "kernels/select_row.cuh"
#include "kernels/step_rows.cuh"

namespace echo {
namespace {

using namespace top_k;

constexpr int kThreads = kListThreads;
constexpr std::int32_t kLargestK = 4096;

__global__ __launch_bounds__(kThreads, 1) void select_cluster(const __grid_constant__ SelectParams p,
                                                              const __grid_constant__ Layout layout,
                                                              const __grid_constant__ NearLists near,
                                                              const __grid_constant__ KernelErrorView errors) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) std::byte bytes[];
  const Memory memory(bytes, layout);
  const auto index = static_cast<std::int32_t>(ptx::cluster_index());
  const std::uint32_t rank = ptx::cluster_rank();
  const std::uint32_t blocks = ptx::cluster_size();
  const bool sifts = p.sift.rows != nullptr;
  if (!sifts) {  // else most clusters do not come to that
    prepare(memory.shared, rank, blocks);
  }
  if (rank == 0) {
    memory.clear_for_list();
  }
  const std::int32_t row_index = p.block.first + index;
  std::int32_t length = position_of(p.step, row_index, errors) + 1;
  if (length > p.score_stride) {
    errors.raise(KernelError::bad_position);
    length = 0;
  }
  const std::int32_t k = p.shape.top_k;
  const Row row{.scores = p.scores + index * p.score_stride,
                .length = length,
                .k = k,
                .selection = p.selection + static_cast<std::int64_t>(row_index) * k,
                .kth_score = p.kth_score + row_index,
                .rank = rank,
                .blocks = blocks};
  __syncthreads();  // all is cleared
  wait_for_kernel_before();
  // Recall finds room where blocks leave, and looks at slots at once: here, behind our own wait, no score that
  // prefetches is still changing them.
  let_next_kernel_begin();
  const Sifted sifted(p.sift, index, rank == 0);
  if (rank == 0 && threadIdx.x == 0) {
    begin_near(near, index);
  }
  const bool whole = sifted.whole(row, min(p.sift.capacity, layout.capacity));
  if (sifts && p.counters != nullptr && rank == 0 && threadIdx.x == kThreads - 1 && length > 0) {
    add_to(p.counters->candidates, sifted.found);
    add_to(p.counters->full_selects, length >= k && !whole ? 1 : 0);
  }
  if (length < k) {
    if (rank == 0) {
      write_all<kThreads>(length, k, row.selection);
    }
    return;
  }
  std::uint32_t bound = sifted.bound;
  List list;
  if (whole) [[likely]] {
    if (rank != 0) {
      return;
    }
    list = sifted.list(length, memory.entries);
  } else {
    if (sifts) {
      prepare(memory.shared, rank, blocks);
    }
    ptx::cluster_wait();
    list_row(row, memory, bound);
    if (has_to_search(row, memory)) {
      return search_all(row, bound, memory);
    }
    if (rank != 0) {
      return;
    }
    list = {memory.entries, memory.shared.listed};
  }
  leave_near(list, near, index);
  select_listed(row, list, bound, memory);
#endif
}

constexpr std::size_t kSharedBytes = 227 * 1024;

/// Room for 4 k tokens or what fits beside the bitmap, at least 2 k; a capacity of 0: that does not fit.
Layout layout_of(const SelectParams& params) {
  const std::int32_t k = params.shape.top_k;
  constexpr std::int64_t kStep = Bitmap::kTogether * kGroupBits;
  const std::int64_t groups = (params.score_stride + kStep - 1) / kStep * Bitmap::kTogether;
  if (k > kLargestK || groups > static_cast<std::int64_t>(kSharedBytes / sizeof(std::uint64_t))) {
    return {};
  }
  for (std::int32_t capacity = std::max(8192, 4 * k); capacity >= std::max(2 * k, kBins); capacity -= 1024) {
    const Layout layout{
        .capacity = capacity, .groups = static_cast<std::int32_t>(groups), .bins = std::max(kBins, (k + 3) / 4 * 4)};
    if (layout.bytes() <= kSharedBytes) {
      return layout;
    }
  }
  return {};
}

int clusters_at_once(std::int32_t blocks) {
  const ClusterLaunch launch({}, blocks, 1, kThreads, kSharedBytes);
  int clusters = 0;
  ECHO_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, select_cluster, &launch.config));
  return clusters;
}

/// As many blocks per row as still let all rows run at once, but parts of some size. A row that had to wait for another
/// one's end would double the time, and a cluster lies within one of the GPU's groups of multiprocessors: 132 of them
/// hold 30 clusters of 4, not 33.
std::int32_t blocks_per_row(const SelectParams& params, const SelectClusterPlan& plan) {
  constexpr std::int64_t kSmallestPart = 4096;
  constexpr std::int64_t kLongRow = 8 * 32768;  // gets 16 blocks
  std::int32_t blocks = 1;
  for (std::size_t i = 1; i < plan.at_once.size(); ++i) {
    const std::int64_t scores = i + 1 < plan.at_once.size() ? 2 * blocks * kSmallestPart : kLongRow;
    if (params.block.count > plan.at_once[i] || params.score_stride < scores) {
      break;
    }
    blocks *= 2;
  }
  return blocks;
}

}  // namespace

SelectClusterPlan plan_select_cluster(int device) {
  int major = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  cudaFuncAttributes attributes{};
  const auto* kernel = reinterpret_cast<const void*>(select_cluster);
  ECHO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  if (major < 9 || attributes.ptxVersion < 90) {
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
  for (std::size_t i = 0; i < plan.at_once.size(); ++i) {
    plan.at_once[i] = clusters_at_once(1 << i);
  }
  return plan;
}

bool fits_select_cluster(const SelectParams& params, const SelectClusterPlan& plan) {
  return plan.usable() && params.shape.top_k > 0 && layout_of(params).capacity > 0 &&
         params.score_stride % kVectorScores == 0 &&
         reinterpret_cast<std::uintptr_t>(params.scores) % sizeof(float4) == 0;
}

void launch_select_cluster(const SelectParams& params, const SelectClusterPlan& plan, const NearLists& near,
                           const LaunchContext& context) {
  if (params.block.count == 0) {
    return;
  }
  const Layout layout = layout_of(params);
  const std::int32_t blocks = blocks_per_row(params, plan);
  const ClusterLaunch launch(context, blocks, params.block.count, kThreads, layout.bytes());
  ECHO_CUDA_CHECK(cudaLaunchKernelEx(&launch.config, select_cluster, params, layout, near, context.errors));
}

}  // namespace echo
