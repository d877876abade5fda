// score on Hopper's tensor cores: score[row, s] = scale_s * sum_h weight_h * relu(q_h . k_s) with FP8 keys of 128
// dimensions.
//
// One thread block per multiprocessor takes an equal part of all key blocks (score_groups.cuh). Its warps pass work on
// through a ring of stages: one warp has the copy engine fetch blocks of 64 keys and scales, 8,448 contiguous bytes
// each; warpgroups take the blocks in turn and multiply them with the queries of the group's rows, kColumns heads of
// rows at once (64 tokens x kColumns); loaders meanwhile quantise the next group's queries into a second buffer. A
// lane holds two tokens and a quarter of the heads: it sums over its heads, then four lanes add up, in a fixed order.
// Bits depend on query, weights and key alone: every score is the same instructions wherever its block is computed.
// Cost: index keys read once per group at the speed of memory, about 0.23 us per block and multiprocessor, of which
// the tensor cores need 0.07 and sums over heads as much (per 64 heads). Up to 23 blocks (190 KB) are on their way.
#include <algorithm>
#include <cstdint>
#include <string>

#include "echo/errors.hpp"
#include "kernels/index_key_map.hpp"
#include "kernels/launch.cuh"
#include "kernels/score_fetch.cuh"
#include "kernels/score_multiply.cuh"
#include "kernels/score_sm90.hpp"
#include "kernels/score_stages.cuh"

namespace echo {
namespace {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasCode = true;
#else
constexpr bool kHasCode = false;
#endif
/// Differs between the machine codes of a build for several architectures; the host asks the one that was loaded.
__device__ const bool has_code = kHasCode;

template <int kHeads, int kColumns>
__global__ __launch_bounds__(kScoreThreads, 1) void score_sm90(const __grid_constant__ CUtensorMap keys,
                                                               const __grid_constant__ ScoreParams p,
                                                               const __grid_constant__ RowGroups groups,
                                                               const __grid_constant__ KernelErrorView errors) {
  if constexpr (kHasCode) {
    const ScoreStages shared({.heads = kHeads, .group_rows = groups.rows});
    GroupWalk walk(p, groups, errors);
    if (warp_index() == kFetcher + 1) {
      prefetch_map(keys);
      shared.make_barriers();
      announce(kBarriersMade, 2 * kWarp);
    }
    const bool any = walk.begin();
    if (warp_index() == kFetcher) {
      join(kBarriersMade, 2 * kWarp);
    }
    if (!any) {
      return;  // all of the thread block
    }
    if (warp_index() == kFetcher) {
      fetch_keys(keys, p, walk, shared, errors);  // on their way while the others load the first queries
      return;
    }
    fill_queries<kHeads>(p, walk, shared, errors);
    if (warp_index() < kFetcher) {
      multiply_keys<kHeads, kColumns>(p, shared);
    }
  }
}

using Kernel = void (*)(CUtensorMap, ScoreParams, RowGroups, KernelErrorView);

/// Heads are filled up to this many.
std::int32_t padded_heads(std::int32_t heads) { return heads <= 32 ? 32 : 64; }

/// Columns of one product: without further rows of the session there is nothing to fill more with.
std::int32_t columns_of(std::int32_t query_rows) { return query_rows == 1 ? 64 : 128; }

Kernel kernel_of(std::int32_t heads, std::int32_t columns) {
  if (heads == 32) {
    return columns == 64 ? score_sm90<32, 64> : score_sm90<32, 128>;
  }
  return columns == 64 ? score_sm90<64, 64> : score_sm90<64, 128>;
}

std::int32_t divided_up(std::int32_t value, std::int32_t by) { return (value + by - 1) / by; }

/// Rows of an entry in groups of about the same size, each a whole number of products.
RowGroups groups_of(const ScoreParams& params, std::int32_t heads, std::int32_t columns) {
  const std::int32_t rows = std::min(params.step.query_rows, params.block.count);
  const std::int32_t per_entry = divided_up(rows * heads, kMostColumns);
  const std::int32_t per_product = columns / heads;
  const std::int32_t first_entry = params.block.first / params.step.query_rows;
  const std::int32_t last_entry = (params.block.first + params.block.count - 1) / params.step.query_rows;
  return {.first_entry = first_entry,
          .per_entry = per_entry,
          .rows = divided_up(divided_up(rows, per_entry), per_product) * per_product,
          .count = (last_entry - first_entry + 1) * per_entry};
}

}  // namespace

bool prepare_score_sm90(const ShapeView& shape, int device) {
  int major = 0;
  int minor = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0 || shape.index_key_format != IndexKeyFormat::fp8 || shape.index_dim != kQueryDim ||
      shape.index_heads > 64 || !has_index_key_map()) {
    return false;
  }
  bool compiled = false;
  ECHO_CUDA_CHECK(cudaMemcpyFromSymbol(&compiled, has_code, sizeof compiled));
  if (!compiled) {
    return false;
  }
  for (const std::int32_t columns : {64, 128}) {
    ECHO_CUDA_CHECK(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel_of(padded_heads(shape.index_heads), columns)),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  }
  return true;
}

void launch_score_sm90(const ScoreParams& params, const LaunchContext& context) {
  if (reinterpret_cast<std::uintptr_t>(params.index_q) % sizeof(uint4) != 0) {
    throw InvalidArgument("index_q: has to be aligned to " + std::to_string(sizeof(uint4)) + " bytes");
  }
  if (params.block.count == 0) {
    return;
  }
  const std::int32_t heads = padded_heads(params.shape.index_heads);
  const std::int32_t columns = columns_of(params.step.query_rows);
  launch(context, kernel_of(heads, columns), static_cast<unsigned>(context.multiprocessors), kScoreThreads,
         kSharedBytes, index_key_map(params.layer), params, groups_of(params, heads, columns), context.errors);
}

}  // namespace echo
