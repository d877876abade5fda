// score on Hopper's tensor cores: score[row, s] = scale_s * sum_h weight_h * relu(q_h . k_s) with FP8 keys of 128
// dimensions.
//
// One thread block per multiprocessor takes an equal part of all key blocks (score_groups.cuh). Its warps pass work on
// through a ring of stages: one warp has the copy engine fetch blocks of 64 keys and scales, 8,448 contiguous bytes
// each; warpgroups take the blocks in turn and multiply them with the queries of the group's rows, 64 tokens x kColumns
// (heads of one or more rows); loaders meanwhile quantise the next group's queries into a second buffer. A lane holds
// two tokens and a quarter of the heads: it sums over its heads, then four lanes add up, in a fixed order. Bits depend
// on query, weights and key alone: every score is the same arithmetic wherever its block is computed. Where it is asked
// to, a loader writes the new tokens' keys (score_new_keys.cuh); the multiplying warps compare scores with bounds
// (score_sift.cuh), and a loader lists rows for a few thread blocks that fetch them ahead (score_prefetch.cuh).
// Calls that do none of that, with one or two rows of a session, take a kernel of their own: score_plain.cuh.
// Cost: index keys read once per group of rows. A multiprocessor has room for 12 blocks (100 KB). To ask for one takes
// a warp 400 to 470 cycles here, about as long as memory does to bring it, and 350 in score_plain, where two warps do.
// H200, 64 heads, a row per session, score_plain: 3.9 us for 1 x 16K tokens, 6.5 for 1 x 100K, 45 for 13 x 100K, 224
// for 64 x 100K; with two rows per session 50 for 13 x 100K; the memory's datasheet speed would allow 0.5, 2.8, 37, 180
// and 37.
// docs/measurements/score.md has what each part takes.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "echo/errors.hpp"
#include "kernels/index_key_map.hpp"
#include "kernels/launch.cuh"
#include "kernels/score_fetch.cuh"
#include "kernels/score_multiply.cuh"
#include "kernels/score_new_keys.cuh"
#include "kernels/score_plain.cuh"
#include "kernels/score_prefetch.cuh"
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

template <int kHeads, int kColumns, bool kOne, bool kSift>
__global__ __launch_bounds__(kScoreThreads, 1) void score_sm90(const __grid_constant__ CUtensorMap keys,
                                                               const __grid_constant__ ScoreParams p,
                                                               const __grid_constant__ RowGroups groups,
                                                               PrefetchQueue* queue,
                                                               const __grid_constant__ KernelErrorView errors) {
  if constexpr (kHasCode) {
    const ScoreStages shared(
        {.heads = kHeads, .group_rows = groups.rows, .sift_bytes = kSift ? sift_bytes<kColumns / kHeads, kOne>() : 0});
    const int warp = __shfl_sync(kAllLanes, warp_index(), 0);  // the compiler then knows that lanes agree
    if (warp == kFetcher) {
      if (ptx::elect()) {
        ptx::prefetch_map(keys);
      }
      __syncwarp();
      if (kSift) {
        sift_memory(shared).clear();
      }
    } else if (warp < kFetcher) {
      shared.make_barriers(warp, kMultiplierWarps);
      announce(kBarriersMade, kScoreThreads);
    }
    if (kSift && warp == kLister && lane_index() == 0 && p.sift.prefetch_cap > 0.0F) {
      ptx::prefetch(&p.layer.replacement->missed);
    }
    wait_for_kernel_before();
    let_next_kernel_begin();
    if (warp == kLister && p.index_key != nullptr) {
      prefetch_new_keys(p);
    }
    RunMaker maker(p, groups, errors);
    const bool any = maker.begin();
    if (warp >= kFetcher) {
      join(kBarriersMade, kScoreThreads);
    }
    if (kSift && warp == kLister) {
      if (any && maker.prefetches()) {
        bring_map(p, maker.run());
      }
      clear_next(p);
    }
    if (!any) {  // all of the thread block
      if (kSift && maker.prefetches()) {
        prefetch_rows(p, maker.scorers(), *queue, *reinterpret_cast<PrefetchBlock*>(shared.idle()));
      }
      return;
    }
    if (warp == kFetcher) {
      // On their way while queries are loaded.
      fetch_keys<kKeepsKeys<kHeads, kColumns>>(keys, p, maker, shared, errors);
      if (kSift) {
        show(sift_memory(shared).fetched, 1);
      }
    } else if (warp > kFetcher) {
      if (warp == kLister && p.index_key != nullptr) {
        if constexpr (kKeepsKeys<kHeads, kColumns>) {
          keep_new_keys(p, maker, shared, errors);
        }
        append_new_keys(p, maker, kKeepsKeys<kHeads, kColumns> ? kKeptKeys : 0, shared, errors);
      }
      if (warp == kLister) {
        if (kSift && maker.prefetches()) {
          list_missing(p, sift_memory(shared), maker.left(), *queue, errors);
        }
      } else {
        load_next_queries<kHeads, kSift>(p, maker, shared, errors);
      }
    } else {
      load_first_queries<kHeads, kSift>(p, maker, shared, errors);
      multiply_keys<kHeads, kColumns, kOne, kSift>(p, shared);
    }
  }
}

/// Without new keys and sifting, and with the rows of a session in one product.
template <int kHeads, int kRows>
__global__ __launch_bounds__(kScoreThreads, 1) void score_plain(const __grid_constant__ CUtensorMap keys,
                                                                const __grid_constant__ ScoreParams p,
                                                                const __grid_constant__ EntryShares shares,
                                                                const __grid_constant__ KernelErrorView errors) {
  if constexpr (kHasCode) {
    constexpr int kQueryBarrierMaker = kMultiplierWarps - 2;  // has fewest queries to load; the last one loads lengths
    constexpr int kFirstLoads = (kRows * kHeads / kHeadsAtOnce + kMultiplierWarps - 1) / kMultiplierWarps;
    const ScoreStages shared({.heads = kHeads, .group_rows = kRows, .sift_bytes = 0});
    const int warp = agreed(warp_index());
    if (warp < kFetcher) {
      shared.make_stage_barriers(warp);
      if (warp != kQueryBarrierMaker) {
        announce(kBarriersMade, kScoreThreads);
      }
    } else if (warp == kFetcher && ptx::elect()) {
      ptx::prefetch_map(keys);
    }
    __syncwarp();
    wait_for_kernel_before();
    let_next_kernel_begin();
    EntryWalk<kRows> walk(p, shares, errors);
    const int log_fetchers = kRows == 1 && walk.left() >= shares.long_share ? 1 : 0;
    const int loaders = kLoaderWarps - log_fetchers;
    if (warp == kQueryBarrierMaker) {
      shared.make_query_barriers(static_cast<std::uint32_t>(loaders));
      announce(kBarriersMade, kScoreThreads);
    }
    if (!walk.any()) {  // all of the thread block
      if (warp >= kFetcher) {
        join(kBarriersMade, kScoreThreads);
      }
      return;
    }
    if (warp == kFetcher || (warp == kLister && log_fetchers > 0)) {
      // On their way while queries are loaded.
      fetch_plain(keys, p, shares, walk, shared, errors, warp == kFetcher ? 0 : 1, log_fetchers);
    } else if (warp > kFetcher) {
      join(kBarriersMade, kScoreThreads);
      load_further_queries<kHeads>(p, walk, warp - kFetcher - 1, loaders, shared, errors);
    } else {
      load_plain_queries<kHeads, kFirstLoads>(p, walk, warp, kMultiplierWarps, shared, errors);
      meet(kStart, kMultiplierWarps * kWarp);
      multiply_plain<kHeads>(p, walk, shared);
    }
  }
}

using PlainKernel = void (*)(CUtensorMap, ScoreParams, EntryShares, KernelErrorView);

using Kernel = void (*)(CUtensorMap, ScoreParams, RowGroups, PrefetchQueue*, KernelErrorView);

/// How products are cut: heads are filled up to a number, columns are rows x heads, and `one` product may do for all
/// rows of a group.
struct ProductShape {
  std::int32_t heads;
  std::int32_t columns;
  bool one;
};

constexpr std::int32_t kWidest = 128;  ///< columns of a product

std::int32_t padded_heads(std::int32_t heads) { return heads <= 32 ? 32 : 64; }

/// Of rows of the same session in a call.
ProductShape product_of(std::int32_t heads, std::int32_t rows) {
  return rows <= 2 ? ProductShape{heads, rows * heads, true} : ProductShape{heads, kWidest, false};
}

template <bool kSift>
Kernel kernel_of(const ProductShape& product) {
  if (product.heads == 32) {
    return product.columns == 32   ? score_sm90<32, 32, true, kSift>
           : product.columns == 64 ? score_sm90<32, 64, true, kSift>
                                   : score_sm90<32, kWidest, false, kSift>;
  }
  return product.columns == 64 ? score_sm90<64, 64, true, kSift>
         : product.one         ? score_sm90<64, kWidest, true, kSift>
                               : score_sm90<64, kWidest, false, kSift>;
}

PlainKernel plain_kernel_of(std::int32_t heads, std::int32_t rows) {
  return heads == 32 ? rows == 1 ? score_plain<32, 1> : score_plain<32, 2>
         : rows == 1 ? score_plain<64, 1>
                     : score_plain<64, 2>;
}

std::int32_t divided_up(std::int32_t value, std::int32_t by) { return (value + by - 1) / by; }

/// One of so many equal parts, in units of 2^-32, rounded up.
std::uint32_t share_of(std::int32_t parts) {
  const std::uint64_t all = std::uint64_t{1} << 32;
  const auto count = static_cast<std::uint64_t>(parts);
  return static_cast<std::uint32_t>((all + count - 1) / count);
}

ScoreParts parts_of(std::int32_t blocks) { return {.blocks = blocks, .share = share_of(blocks)}; }

constexpr std::int32_t kPrefetchers = 8;       ///< thread blocks that prefetch ...
constexpr std::int32_t kMorePrefetchers = 12;  ///< ... where much is missing ...
constexpr std::int32_t kLeastShare = 30;       ///< ... and others have so many key blocks each

/// Rows of an entry in groups of about the same size, each a whole number of products.
RowGroups groups_of(const ScoreParams& params, const ProductShape& product, std::int32_t rows, std::int32_t grid) {
  const std::int32_t per_entry = divided_up(rows * product.heads, kMostColumns);
  const std::int32_t per_product = product.columns / product.heads;
  const std::int32_t first_entry = params.block.first / params.step.query_rows;
  const std::int32_t last_entry = (params.block.first + params.block.count - 1) / params.step.query_rows;
  const bool prefetches = params.sift.rows != nullptr && params.sift.prefetch_cap > 0.0F;
  const auto without = [&](std::int32_t blocks) { return grid - (prefetches ? std::min(blocks, grid / 2) : 0); };
  const std::int32_t scorers = without(kPrefetchers);
  return {.first_entry = first_entry,
          .per_entry = per_entry,
          .rows = divided_up(divided_up(rows, per_entry), per_product) * per_product,
          .count = (last_entry - first_entry + 1) * per_entry,
          .parts = parts_of(grid),
          .enough = static_cast<std::uint32_t>(kLeastShare) * static_cast<std::uint32_t>(scorers),
          .with_some = parts_of(scorers),
          .with_more = parts_of(without(kMorePrefetchers))};
}

/// Kernels count key blocks in 32 bits.
void require_countable(const ScoreParams& params, const RowGroups& groups) {
  const std::int64_t blocks = (params.score_stride + kTokensPerBlock - 1) / kTokensPerBlock * groups.count;
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    throw InvalidArgument("score_stride: " + std::to_string(params.score_stride) + " given for " +
                          std::to_string(groups.count) +
                          " groups of rows, expected at most 2^31 - 1 key blocks in all");
  }
}

EntryShares shares_of(const ScoreParams& params, const RowGroups& groups) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t tokens =
      std::min({params.score_stride, std::int64_t{params.step.table_stride} * kTokensPerBlock, kMost});
  return {.first_entry = groups.first_entry,
          .count = groups.count,
          .part = groups.parts.share,
          .limit = static_cast<std::uint32_t>(tokens),
          .host_blocks = static_cast<std::uint32_t>(std::min(params.layer.host_rows / kTokensPerBlock, kMost)),
          .long_share = groups.count <= groups.parts.blocks ? kLongShare : std::numeric_limits<std::int32_t>::max()};
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
  for (const std::int32_t rows : {1, 2, 3}) {
    const ProductShape product = product_of(padded_heads(shape.index_heads), rows);
    if (product.one) {
      ECHO_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(plain_kernel_of(product.heads, rows)),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    }
    for (const Kernel kernel : {kernel_of<false>(product), kernel_of<true>(product)}) {
      ECHO_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    }
  }
  return true;
}

void launch_score_sm90(const ScoreParams& params, PrefetchQueue* queue, const LaunchContext& context) {
  if (reinterpret_cast<std::uintptr_t>(params.index_q) % sizeof(uint4) != 0) {
    throw InvalidArgument("index_q: has to be aligned to " + std::to_string(sizeof(uint4)) + " bytes");
  }
  if (params.block.count == 0) {
    return;
  }
  const std::int32_t rows = std::min(params.step.query_rows, params.block.count);
  const ProductShape product = product_of(padded_heads(params.shape.index_heads), rows);
  const RowGroups groups = groups_of(params, product, rows, context.multiprocessors);
  require_countable(params, groups);
  if (params.sift.rows == nullptr && params.index_key == nullptr && product.one) {
    return launch_early(context, plain_kernel_of(product.heads, rows), static_cast<unsigned>(context.multiprocessors),
                        kScoreThreads, kSharedBytes, index_key_map(params.layer), params, shares_of(params, groups),
                        context.errors);
  }
  const Kernel kernel = params.sift.rows != nullptr ? kernel_of<true>(product) : kernel_of<false>(product);
  launch_early(context, kernel, static_cast<unsigned>(context.multiprocessors), kScoreThreads, kSharedBytes,
               index_key_map(params.layer), params, groups, queue, context.errors);
}

}  // namespace echo
