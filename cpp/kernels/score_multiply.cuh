#pragma once
// The warpgroups of score on Hopper: 64 tokens x kColumns (query rows x heads) on the tensor cores, then the sum over
// heads in registers. A lane holds two tokens and a quarter of the heads; its sums are chains over its heads in their
// order, four lanes' sums are added in a fixed tree.

#include <cstdint>

#include "kernels/score_stages.cuh"
#include "kernels/warpgroup_mma.cuh"

namespace echo {

/// The scale of a key of a block as the copy engine lays it down: two rows behind the keys, swizzled like them.
__device__ inline float scale_of(const std::byte* block, std::int32_t token) {
  const auto byte = static_cast<std::uint32_t>(token) * static_cast<std::uint32_t>(sizeof(float));
  return *reinterpret_cast<const float*>(block + swizzled(kTokensPerBlock + byte / kMapRowBytes, byte % kMapRowBytes));
}

/// Twice relu(x); NaN stays.
__device__ inline float twice_relu(float x) { return x + fabsf(x); }

/// Adds up the heads of one row for the lane's two tokens; even lanes get the first token's sum over two lanes, odd
/// lanes the second's.
template <int kHeads>
__device__ float sum_heads(const float* dots, const float4* weights) {
  float sums[2][2] = {};  // [token][even or odd column]
#pragma unroll
  for (int i = 0; i < kHeads / 16; ++i) {
    const float4 weight = weights[i * 4 + lane_index() % 4];
    const float* eight = dots + i * 8;
#pragma unroll
    for (int token = 0; token < 2; ++token) {
      sums[token][0] = fmaf(weight.x, twice_relu(eight[2 * token]), sums[token][0]);
      sums[token][1] = fmaf(weight.y, twice_relu(eight[2 * token + 1]), sums[token][1]);
    }
#pragma unroll
    for (int token = 0; token < 2; ++token) {
      sums[token][0] = fmaf(weight.z, twice_relu(eight[4 + 2 * token]), sums[token][0]);
      sums[token][1] = fmaf(weight.w, twice_relu(eight[4 + 2 * token + 1]), sums[token][1]);
    }
  }
  const float first = sums[0][0] + sums[0][1];
  const float second = sums[1][0] + sums[1][1];
  const bool odd = lane_index() % 2 == 1;
  return (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
}

/// Sums of two rows over the other two lanes: lanes 0 and 1 of four get the first row's, lanes 2 and 3 the second's.
__device__ inline float sum_lanes(float first, float second) {
  const bool upper = lane_index() % 4 >= 2;
  return (upper ? second : first) + __shfl_xor_sync(kAllLanes, upper ? first : second, 2);
}

/// Scores of the warp's 16 tokens for kColumns / kHeads rows, of which the first `rows` count.
template <int kHeads, int kColumns>
__device__ void store_scores(const ScoreParams& p, const float (&dots)[kColumns / 2], const StageWork& work,
                             std::int32_t row, float scale, std::int32_t in_block, const GroupQueries& queries) {
  constexpr int kRows = kColumns / kHeads;
  const std::int32_t token = work.token + in_block;
  const std::int32_t rows = min(work.rows - row, kRows);
  float sums[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sums[i] =
        sum_heads<kHeads>(dots + i * kHeads / 2, reinterpret_cast<const float4*>(queries.weights + (row + i) * kHeads));
  }
#pragma unroll
  for (int i = 0; i < kRows; i += 2) {
    const float sum = sum_lanes(sums[i], sums[i + 1 < kRows ? i + 1 : i]);
    const std::int32_t own = i + lane_index() % 4 / 2;
    if (own < rows && token < queries.lengths[row + own]) {
      p.scores[(work.row + row + own) * p.score_stride + token] = sum * scale;
    }
  }
}

/// A warpgroup: every kMultipliers-th block of keys.
template <int kHeads, int kColumns>
__device__ void multiply_keys(const ScoreParams& p, const ScoreStages& shared) {
  constexpr int kRows = kColumns / kHeads;
  const std::int32_t in_block = warp_index() % kGroupWarps * 16 + lane_index() / 4 + lane_index() % 2 * 8;
  std::int32_t group = 0;  // its queries are there: all warps have loaded them
  for (RingPlace place{.stage = warp_index() / kGroupWarps};; place.advance(kMultipliers, shared.stages)) {
    wait(shared.full[place.stage], place.parity);
    const StageWork work = shared.work[place.stage];
    // One group after the other, also those of which other warpgroups have all blocks: a buffer's barriers must not be
    // two phases ahead of anyone.
    for (; group < work.group; ++group) {
      __syncwarp();
      if (lane_index() == 0) {
        arrive(shared.queries_empty[group % kBuffers]);
      }
      wait(shared.queries_full[(group + 1) % kBuffers], static_cast<std::uint32_t>(group / kBuffers) & 1U);
    }
    if (work.rows == 0) {
      return;
    }
    const GroupQueries queries = shared.queries_of(group);
    const std::byte* keys = shared.keys + place.stage * kStageBytes;
    const float scale = scale_of(keys, in_block);
    for (std::int32_t row = 0; row < work.rows; row += kRows) {
      float dots[kColumns / 2];
      multiply(dots, operand_at(shared_address(keys)),
               operand_at(shared_address(queries.codes + row * kHeads * kQueryDim)));
      if (row + kRows >= work.rows) {
        __syncwarp();
        if (lane_index() == 0) {
          arrive(shared.empty[place.stage]);
        }
      }
      store_scores<kHeads, kColumns>(p, dots, work, row, scale, in_block, queries);
    }
  }
}

}  // namespace echo
