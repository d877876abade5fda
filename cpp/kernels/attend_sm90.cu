// attend_sm90: sparse MLA on Hopper's tensor cores; a team of blocks per query row and 64 heads, a block per split.
//
// A block takes its split in tiles of 128 entries. Two warpgroups gather rows by slot into shared memory, as bf16
// (mla_gather.cuh); two others take turns on logits, softmax and 64 x 256 fp32 sums each, in registers
// (mla_attend.cuh). Blocks of a team meet through the L2 cache. Most steps have no more items than teams
// (mla_once.cuh). Where there are more, all tiles are dealt out in equal parts, an item that two teams have is handed
// over as it is (mla_stretch.hpp, mla_hand_over.cuh), and blocks meet (mla_meet.cuh) while the rows and queries of
// their next item arrive. Splits are places of the selection: bits depend neither on the batch nor on how many teams
// there are. Where selections are one split, blocks have so many halves in a row that FP8 rows are loaded otherwise
// (mla_whole.cuh) and references told earlier (mla_attend.cuh): kWhole, with the same bits. With fewer halves that
// takes longer.
// Cost, FP8 rows on an H200: 445 TFLOP/s with 64 query rows of 128 heads, 438 with 102. A tile takes some 9,200 cycles,
// 8,300 or less with kWhole: gathering alone 60 % of that, logits, softmax and outputs alone 75 %, the tensor cores
// 4,352, shared memory 6,000. An item takes 7,400 to 8,600 more to leave its sums, tell and combine.
// docs/measurements/attention.md has the parts. 192 registers for a consumer, 64 for a gatherer (208 and 48 with BF16
// rows), 217 KB of shared memory: one block per multiprocessor.
//
// A block waits for others of its team, which need not have begun: another kernel may hold multiprocessors, even
// another launch of this one. Blocks take tickets as they begin, and a team's are next to each other. So of the blocks
// that have begun, all but those of the last team have their teams complete, or will have without any block's end. What
// is handed to them comes from the team before, which does it first, and waits for nobody before that. So they finish
// all their items, and leave their multiprocessors to blocks that wait to begin. It takes as many as a team has
// blocks, for one of the launches that share the GPU. (That blocks begin in order of their index is nowhere promised.)
#include "kernels/attend_sm90.hpp"

#include <algorithm>
#include <string>

#include "echo/errors.hpp"
#include "kernels/launch.cuh"
#include "kernels/mla_consume.cuh"
#include "kernels/mla_gather.cuh"
#include "kernels/mla_once.cuh"
#include "kernels/mla_whole.cuh"

namespace echo {
namespace {

using namespace mla;

template <RowFormat kFormat, Teams kTeams, bool kWhole>
__global__ __launch_bounds__(kThreads, 1) void attend_sm90(const __grid_constant__ AttendParams p,
                                                           const __grid_constant__ Work work,
                                                           const __grid_constant__ AttendExchange exchange,
                                                           const __grid_constant__ KernelErrorView errors) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    const bool ordered = p.splits > 1 || work.deal.cut();                              // some block waits for another
    shared.ticket = ordered ? atomicInc(exchange.ticket, gridDim.x - 1) : blockIdx.x;  // 0 again after the last
    shared.stretch = work.deal.stretch(static_cast<std::int32_t>(work.seat(shared.ticket, p.splits).team));
    for (int half = 0; half < kHalves; ++half) {
      shared.full[half].init(kFullArrivals<kWhole>);
      shared.empty[half].init(kConsumerWarps);
    }
  }
  __syncthreads();
  // Of 128 registers a thread, which is what all get when the block starts.
  if (threadIdx.x >= kConsumers) {
    ptx::give_registers<kGatherRegisters<kFormat>>();
    const Split split(p, work, work.seat(shared.ticket, p.splits).rank);
    wait_for_kernel_before();
    if constexpr (kWhole) {
      gather_whole(p, work, split, shared.stretch, shared, errors);
    } else {
      gather<kFormat>(p, work, split, shared.stretch, shared, errors);
    }
  } else {
    ptx::take_registers<kConsumerRegisters<kFormat>>();
    const std::int32_t first = shared.stretch.first_item();
    load_query(p, query_row(p, work, first), work.first_head(first), shared);  // no verb before this one writes it
    wait_for_kernel_before();
    if constexpr (kTeams == Teams::deal) {
      consume<kWhole>(p, work, exchange, shared);
    } else {
      consume_once<kWhole>(p, work, exchange, shared);
    }
  }
#endif
}

using Kernel = void (*)(AttendParams, Work, AttendExchange, KernelErrorView);

template <Teams kTeams>
Kernel kernel_of(RowFormat format, bool whole) {
  if (format == RowFormat::bf16_1152) {
    return attend_sm90<RowFormat::bf16_1152, kTeams, false>;
  }
  return whole ? attend_sm90<RowFormat::fp8_656, kTeams, true> : attend_sm90<RowFormat::fp8_656, kTeams, false>;
}
/// `whole`: a selection is one split. Gathering and what consumers do with a half are compiled for it.
Kernel kernel_for(RowFormat format, Teams teams, bool whole) {
  return teams == Teams::once ? kernel_of<Teams::once>(format, whole) : kernel_of<Teams::deal>(format, whole);
}

void require_aligned(const char* what, const void* pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
    throw InvalidArgument(std::string(what) + ": the array has to be aligned to 16 bytes");
  }
}

}  // namespace

AttendSm90Plan plan_attend_sm90(const ShapeView& shape, std::int32_t splits, std::int32_t query_rows, int device) {
#if defined(ECHO_SM90A)
  int major = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9 || !suits_attend_sm90(shape, splits, query_rows)) {
    return {};
  }
  for (const Teams teams : {Teams::deal, Teams::once}) {
    ECHO_CUDA_CHECK(cudaFuncSetAttribute(kernel_for(shape.row_format, teams, splits == 1),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  }
  int multiprocessors = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return {.splits = splits, .teams = std::min(multiprocessors, kAttendBlocks) / splits};
#else
  static_cast<void>(shape);
  static_cast<void>(splits);
  static_cast<void>(query_rows);
  static_cast<void>(device);
  return {};
#endif
}

int launch_attend_sm90(const AttendParams& params, const AttendSm90Plan& plan, const AttendExchange& exchange,
                       const LaunchContext& context) {
  require_aligned("q", params.q);
  require_aligned("slots", params.slots);
  require_aligned("out", params.out);
  if (params.block.count == 0) {
    return 0;
  }
  const Work work = Work::of(params.shape, params.block.count, plan.splits, plan.teams);
  const std::int32_t blocks = work.deal.teams * plan.splits;
  launch_early(context, kernel_for(params.shape.row_format, work.teams(), plan.splits == 1), blocks_for(blocks, 1),
               kThreads, sizeof(Shared), params, work, exchange, context.errors);
  return blocks;
}

}  // namespace echo
