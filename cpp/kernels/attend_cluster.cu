// attend_cluster: sparse MLA on Hopper's tensor cores; a cluster per query row and 64 heads, a block per split.
//
// A block takes its split in tiles of 128 entries. Two warpgroups gather rows by slot into shared memory, as bf16
// (mla_gather.cuh); two others take turns on logits, softmax and 64 x 256 fp32 sums each, in registers
// (mla_attend.cuh). Blocks are combined over distributed shared memory (mla_combine.cuh) while the rows and queries of
// the cluster's next item arrive. Splits are places of the selection: bits depend neither on the batch nor on how many
// clusters there are.
// Cost, FP8 rows on an H200: a tile takes 8,400 cycles, the gathering warpgroups and the chain of logits, softmax and
// outputs about as long each; counted, the tensor cores need 4,352 and shared memory 4,820. An item takes 8,600 more to
// stage, tell and combine. 30 TFLOP/s at B = 1, 250 to 374 at B = 64 with 8 to 1 splits; docs/design.md has the parts.
// 192 registers for a consumer, 64 for a gatherer, 219 KB of shared memory: one block per multiprocessor.
#include "kernels/attend_cluster.hpp"

#include <algorithm>
#include <string>

#include "echo/errors.hpp"
#include "kernels/launch.cuh"
#include "kernels/mla_consume.cuh"
#include "kernels/mla_gather.cuh"

namespace echo {
namespace {

using namespace mla;

template <RowFormat kFormat>
__global__ __launch_bounds__(kThreads, 1) void attend_cluster(const __grid_constant__ AttendParams p,
                                                              const __grid_constant__ Work work,
                                                              const __grid_constant__ KernelErrorView errors) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Split split(p, static_cast<std::int32_t>(ptx::cluster_rank()));
  const auto first = static_cast<std::int32_t>(ptx::cluster_index());
  if (threadIdx.x == 0) {
    const auto consumer_warps = static_cast<std::uint32_t>(kConsumers / kWarp);
    for (int half = 0; half < kHalves; ++half) {
      shared.full[half].init(kGatherWarps);
      shared.empty[half].init(consumer_warps);
    }
    shared.staged.init(consumer_warps * static_cast<std::uint32_t>(p.splits));
    shared.drained.init(consumer_warps * static_cast<std::uint32_t>(p.splits));
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cluster_arrive();
  // Of 128 registers a thread, which is what all get when the block starts.
  if (threadIdx.x >= kConsumers) {
    ptx::give_registers<kGatherRegisters>();
    wait_for_kernel_before();
    gather<kFormat>(p, work, split, first, shared, errors);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    load_query(p, query_row(p, work, first), work.first_head(first), shared);  // no verb before this one writes it
    wait_for_kernel_before();
    ptx::cluster_wait();  // all blocks have their barriers
    consume(p, work, split, first, shared);
  }
  // No block may leave while others read its sums.
  ptx::cluster_arrive();
  ptx::cluster_wait();
#endif
}

using Kernel = void (*)(AttendParams, Work, KernelErrorView);

/// nullptr where the kernel is not for rows of this shape.
Kernel kernel_for(const ShapeView& shape) {
  if (shape.latent_dim != kLatent || shape.rope_dim != kRope || shape.top_k % kHalf != 0) {
    return nullptr;
  }
  switch (shape.row_format) {
    case RowFormat::fp8_656:
      return attend_cluster<RowFormat::fp8_656>;
    case RowFormat::bf16_1152:
      return attend_cluster<RowFormat::bf16_1152>;
    default:
      return nullptr;
  }
}

void require_aligned(const char* what, const void* pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
    throw InvalidArgument(std::string(what) + ": the array has to be aligned to 16 bytes");
  }
}

}  // namespace

AttendClusterPlan plan_attend_cluster(const ShapeView& shape, std::int32_t splits, int device) {
#if defined(ECHO_SM90A)
  int major = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  const Kernel kernel = kernel_for(shape);
  const bool divides = splits == 1 || splits == 2 || splits == 4 || splits == kMaxSplits;
  if (major != 9 || kernel == nullptr || !divides) {
    return {};
  }
  ECHO_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  const ClusterLaunch launch({}, splits, 1, kThreads, sizeof(Shared));
  int clusters = 0;
  ECHO_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config));
  return {.splits = splits, .clusters = clusters};
#else
  static_cast<void>(shape);
  static_cast<void>(splits);
  static_cast<void>(device);
  return {};
#endif
}

int launch_attend_cluster(const AttendParams& params, const AttendClusterPlan& plan, const LaunchContext& context) {
  require_aligned("q", params.q);
  require_aligned("slots", params.slots);
  require_aligned("out", params.out);
  const std::int32_t groups = (params.shape.query_heads + kHeads - 1) / kHeads;
  const std::int32_t items = params.block.count * groups;
  const Work work{.groups = groups, .items = items, .clusters = std::min(plan.clusters, items)};
  if (work.clusters == 0) {
    return 0;
  }
  const ClusterLaunch launch(context, plan.splits, work.clusters, kThreads, sizeof(Shared));
  ECHO_CUDA_CHECK(cudaLaunchKernelEx(&launch.config, kernel_for(params.shape), params, work, context.errors));
  return work.clusters * plan.splits;
}

}  // namespace echo
