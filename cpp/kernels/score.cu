// score: key_scale * sum_h weight_h * relu(q_h . k), a small matrix product in fp32. For every shape and GPU;
// score_sm90.cu is for the shapes of models on Hopper.
//
// A warp holds 32 heads x 64 tokens (one key block) in registers, 8 x 8 per lane, and runs over the
// dimensions in chunks of 32: keys, decoded and transposed, lie in shared memory per warp
// ([dim][token]), queries per thread block
// ([dim][head]); each step loads 16 floats, broadcast or conflict-free, for 64 multiply-adds. A
// block has four warps, so 256 tokens of one query row; rows are next to each other in the grid, so
// that those of a session find the keys in the L2 cache. Every dot product is one chain over the
// dimensions, the sum over heads has a fixed tree, chunks of heads follow each other: bits depend
// on nothing but query, weights and key.
// Cost: heads x dim multiply-adds per row and token (B = 13, L = 100K, V3.2: 10.6 G, 0.35 ms at the fp32 peak).
#include <algorithm>

#include "kernels/e4m3_decode.cuh"
#include "kernels/launch.cuh"
#include "kernels/score.hpp"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDims = 32;  ///< of a chunk
constexpr int kHeads = kIndexHeadChunk;
constexpr int kTileTokens = kWarps * kTokensPerBlock;
constexpr int kLaneHeads = 8;
constexpr int kLaneTokens = 8;
constexpr int kTokenGroups = 8;  ///< lanes side by side along the tokens

using KeyChunk = float[kDims][kTokensPerBlock];
using QueryChunk = float[kDims][kHeads];

/// Dimensions [first, first + dims) of the 64 keys of a block, by one warp.
template <IndexKeyFormat kFormat>
__device__ void load_keys(const std::byte* block, std::int32_t index_dim, std::int32_t first, std::int32_t dims,
                          KeyChunk& keys) {
  constexpr bool kFp8 = kFormat == IndexKeyFormat::fp8;
  constexpr int kElementBytes = kFp8 ? 1 : 4;
  constexpr int kPiece = 16 / kElementBytes;  ///< elements of a 16-byte load
  constexpr int kHalves = kTokensPerBlock / kWarp;
#pragma unroll 2
  for (int piece = 0; piece < dims / kPiece; ++piece) {
    uint4 loaded[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::byte* key = index_key_address(block, half * kWarp + lane_index(), index_dim * kElementBytes);
      loaded[half] = *reinterpret_cast<const uint4*>(key + (first + piece * kPiece) * kElementBytes);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::uint32_t words[4] = {loaded[half].x, loaded[half].y, loaded[half].z, loaded[half].w};
      float (*column)[kTokensPerBlock] = keys + piece * kPiece;
      const int token = half * kWarp + lane_index();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kFp8) {
          const float4 values = unpack_e4m3(words[i]);
          column[4 * i][token] = values.x;
          column[4 * i + 1][token] = values.y;
          column[4 * i + 2][token] = values.z;
          column[4 * i + 3][token] = values.w;
        } else {
          column[i][token] = __uint_as_float(words[i]);
        }
      }
    }
  }
}

__device__ void load_queries(const float* chunk, std::int32_t dims, QueryChunk& query) {
  const auto* source = reinterpret_cast<const float4*>(chunk);
  auto* target = reinterpret_cast<float4*>(&query[0][0]);
  for (int i = static_cast<int>(threadIdx.x); i < dims * kHeads / 4; i += kThreads) {
    target[i] = source[i];
  }
}

__device__ void unpack(float4 four, float* values) {
  values[0] = four.x;
  values[1] = four.y;
  values[2] = four.z;
  values[3] = four.w;
}

/// dots += query x keys over a chunk of dimensions.
__device__ void multiply(const QueryChunk& query, const KeyChunk& keys, std::int32_t dims,
                         float (&dots)[kLaneHeads][kLaneTokens]) {
  const int first_head = lane_index() / kTokenGroups * kLaneHeads;
  const int first_token = lane_index() % kTokenGroups * 4;
#pragma unroll 2
  for (int d = 0; d < dims; ++d) {
    float q[kLaneHeads];
    float k[kLaneTokens];
    unpack(*reinterpret_cast<const float4*>(&query[d][first_head]), q);
    unpack(*reinterpret_cast<const float4*>(&query[d][first_head + 4]), q + 4);
    unpack(*reinterpret_cast<const float4*>(&keys[d][first_token]), k);
    unpack(*reinterpret_cast<const float4*>(&keys[d][first_token + kWarp]), k + 4);
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
      for (int t = 0; t < kLaneTokens; ++t) {
        dots[h][t] = fmaf(q[h], k[t], dots[h][t]);
      }
    }
  }
}

/// totals += sum over the chunk's heads of weight * relu(dot), the same in all lanes of a token.
__device__ void fold_heads(const float* weights, const float (&dots)[kLaneHeads][kLaneTokens],
                           float (&totals)[kLaneTokens]) {
  const float* mine = weights + lane_index() / kTokenGroups * kLaneHeads;
  float sums[kLaneTokens] = {};
#pragma unroll
  for (int h = 0; h < kLaneHeads; ++h) {
    const float weight = mine[h];
#pragma unroll
    for (int t = 0; t < kLaneTokens; ++t) {
      sums[t] = fmaf(weight, dots[h][t] < 0.0F ? 0.0F : dots[h][t], sums[t]);  // NaN stays
    }
  }
#pragma unroll
  for (int t = 0; t < kLaneTokens; ++t) {
    sums[t] += __shfl_xor_sync(kAllLanes, sums[t], kTokenGroups);
    sums[t] += __shfl_xor_sync(kAllLanes, sums[t], 2 * kTokenGroups);
    totals[t] += sums[t];
  }
}

/// Writes the scores of the key block's tokens that lie before `length`.
template <IndexKeyFormat kFormat>
__device__ void store_scores(const float (&totals)[kLaneTokens], const std::byte* block, std::int32_t index_dim,
                             std::int32_t first, std::int32_t length, float* scores) {
#pragma unroll
  for (int t = 0; t < kLaneTokens; ++t) {
    const int in_block = t / 4 * kWarp + lane_index() % kTokenGroups * 4 + t % 4;
    // All four lanes of a token have its total; each writes two of the eight.
    if (t / 2 == lane_index() / kTokenGroups && first + in_block < length) {
      float scale = 1.0F;
      if constexpr (kFormat == IndexKeyFormat::fp8) {
        scale = *reinterpret_cast<const float*>(index_scale_address(block, in_block, index_dim));
      }
      scores[first + in_block] = totals[t] * scale;
    }
  }
}

template <IndexKeyFormat kFormat>
__global__ __launch_bounds__(kThreads, 4) void score(ScoreParams p, IndexQueryView queries, KernelErrorView errors) {
  __shared__ __align__(16) KeyChunk keys[kWarps];
  __shared__ __align__(16) QueryChunk query;
  const std::int64_t i = blockIdx.x;
  const std::int32_t row = p.block.first + static_cast<std::int32_t>(i);
  std::int32_t length = position_of(p.step, row, errors) + 1;
  if (length > p.score_stride) {
    errors.raise(KernelError::bad_position);
    length = 0;
  }
  const std::int32_t dim = p.shape.index_dim;
  const float* values = queries.values + i * queries.heads * dim;
  const float* weights = queries.weights + i * queries.heads;
  KeyChunk& own_keys = keys[warp_index()];

  for (std::int64_t tile = blockIdx.y; tile * kTileTokens < length; tile += gridDim.y) {
    const auto first = static_cast<std::int32_t>(tile) * kTileTokens + warp_index() * kTokensPerBlock;
    const std::int32_t host = first < length ? host_row_of(p.layer, p.step, row, first, errors) : kNone;
    const bool active = host != kNone;
    const std::byte* block =
        row_address(p.layer.index_keys, active ? host / kTokensPerBlock : 0, p.layer.index_block_bytes);
    float totals[kLaneTokens] = {};
    for (std::int32_t head = 0; head < queries.heads; head += kHeads) {
      float dots[kLaneHeads][kLaneTokens] = {};
      for (std::int32_t d = 0; d < dim; d += kDims) {
        const std::int32_t dims = min(kDims, dim - d);
        __syncthreads();  // the chunk before has been used
        load_queries(values + static_cast<std::int64_t>(head) * dim + d * kHeads, dims, query);
        if (active) {
          load_keys<kFormat>(block, dim, d, dims, own_keys);
        }
        __syncthreads();
        if (active) {
          multiply(query, own_keys, dims, dots);
        }
      }
      fold_heads(weights + head, dots, totals);
    }
    if (active) {
      store_scores<kFormat>(totals, block, dim, first, length, p.scores + i * p.score_stride);
    }
  }
}

}  // namespace

void launch_score(const ScoreParams& params, const IndexQueryView& queries, const LaunchContext& context) {
  // Lengths are only known on the device: enough blocks to fill it, in a loop over what tokens
  // there are.
  constexpr std::int64_t kBlocksPerMultiprocessor = 16;
  const std::int64_t tiles = blocks_for(params.score_stride, kTileTokens);
  const std::int64_t rows = std::max(params.block.count, 1);
  const std::int64_t enough = (kBlocksPerMultiprocessor * context.multiprocessors + rows - 1) / rows;
  const dim3 grid(static_cast<unsigned>(params.block.count), static_cast<unsigned>(std::min(tiles, enough)));
  const auto kernel =
      params.shape.index_key_format == IndexKeyFormat::fp8 ? score<IndexKeyFormat::fp8> : score<IndexKeyFormat::fp32>;
  launch(context, kernel, grid, kThreads, 0, params, queries, context.errors);
}

}  // namespace echo
