#pragma once
// The warpgroups of score on Hopper: 64 tokens x kColumns (query rows x heads) on the tensor cores, then the sum over
// heads in registers. A lane holds two tokens and a quarter of the heads; its sums are chains over its heads in their
// order, four lanes' sums are added in a fixed tree.

#include <cstdint>

#include "kernels/ptx/wgmma.cuh"
#include "kernels/score_new_keys.cuh"
#include "kernels/score_sift.cuh"
#include "kernels/score_stages.cuh"

namespace echo {

/// Twice relu(x); NaN stays.
__device__ inline float twice_relu(float x) { return x + fabsf(x); }

/// Adds up the heads of one row for the lane's two tokens; even lanes get the first token's sum over two lanes, odd
/// lanes the second's. Four weights at a time, kWeightStep apart.
template <int kHeads, int kWeightStep>
__device__ float sum_heads(const float* dots, const float4* weights) {
  float sums[2][2] = {};  // [token][even or odd column]
#pragma unroll
  for (int i = 0; i < kHeads / 16; ++i) {
    const float4 weight = weights[i * kWeightStep];
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

/// Where a lane's scores of one product go: rows i + own for i = 0, 2, ...
template <int kRows>
struct LaneRows {
  static constexpr int kPairs = (kRows + 1) / 2;

  float* out[kPairs];          ///< score of the lane's token in the row's first block
  std::int32_t limit[kPairs];  ///< length of the row, less the lane's token in its block

  /// Rows of the product of a group that begins at `row`.
  __device__ void set(const ScoreParams& p, const GroupQueries& queries, std::int32_t row, std::int32_t in_block) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const std::int32_t own = row + 2 * i + lane_index() % 4 / 2;
      const bool there = own < queries.rows[1] && own - row < kRows;
      out[i] = p.scores + (queries.rows[0] + own) * p.score_stride + in_block;
      limit[i] = there ? queries.lengths[own] - in_block : 0;
    }
  }
};

/// Begins dots = keys x queries of n = 2 x kElements columns.
template <int kElements>
__device__ void begin_multiply(float (&dots)[kElements], std::uint64_t keys, std::uint64_t queries) {
  constexpr std::uint32_t kStep = 32;  ///< dimensions of a product
  ptx::wgmma_fence();
#pragma unroll
  for (std::uint32_t from = 0; from < kQueryDim; from += kStep) {
    ptx::wgmma_e4m3(dots, ptx::advanced(keys, from), ptx::advanced(queries, from), from > 0);
  }
  ptx::wgmma_commit();
}

/// A warpgroup: every kMultipliers-th block of keys. With kOne, a group's rows fit in one product.
template <int kHeads, int kColumns, bool kOne, bool kSift>
__device__ void multiply_keys(const ScoreParams& p, const ScoreStages& shared) {
  constexpr int kRows = kColumns / kHeads;
  constexpr int kFours = kHeads / 16;  ///< float4 of weights of a row that a lane needs
  const int warp = __shfl_sync(kAllLanes, warp_index(), 0);
  const std::int32_t in_block = warp % kGroupWarps * 16 + lane_index() / 4 + lane_index() % 2 * 8;
  const std::uint32_t own_scale = scale_byte(in_block);
  std::int32_t group = -1;
  std::int32_t rows = 0;
  std::uint64_t query_operand = 0;
  float4 kept[kOne ? kRows * kFours : 1];  ///< the weights of a group's rows
  LaneRows<kRows> lane_rows{};
  [[maybe_unused]] LaneSift<kRows, kOne> lane_sift(p, shared, warp);
  const auto weights_of = [&](const GroupQueries& queries, std::int32_t row) {
    return reinterpret_cast<const float4*>(queries.weights + row * kHeads) + lane_index() % 4;
  };
  const auto enter = [&](const GroupQueries& queries) {
    rows = queries.rows[1];
    query_operand = ptx::k_major(ptx::shared_address(queries.codes));
    if (kOne) {
      lane_rows.set(p, queries, 0, in_block);
#pragma unroll
      for (int i = 0; i < kRows * kFours; ++i) {
        kept[i] = weights_of(queries, 0)[i * 4];
      }
    }
    if constexpr (kSift) {
      lane_sift.enter(queries, group);
    }
  };

  for (RingPlace place{.stage = warp / kGroupWarps};; place.advance(kMultipliers, shared.stages)) {
    shared.full[place.stage].wait(place.parity);
    const StageWork work = shared.work[place.stage];
    if (work.group != group) {
      // One group after the other, also those of which other warpgroups have all blocks: a buffer's barriers must not
      // be two phases ahead of anyone.
      while (group < work.group) {
        if (group >= 0) {
          __syncwarp();
          if (lane_index() == 0) {
            shared.queries_empty[group % kBuffers].arrive();
          }
        }
        ++group;
        if (group > 0) {
          shared.queries_full[group % kBuffers].wait((static_cast<std::uint32_t>(group + 1) / kBuffers - 1U) & 1U);
        }
      }
      enter(shared.queries_of(group));
    }
    if (work.token == kNone) {
      break;
    }
    std::byte* keys = shared.keys + place.stage * kStageBytes;
    if constexpr (kKeepsKeys<kHeads, kColumns>) {
      if (work.new_count > 0) [[unlikely]] {
        put_kept_keys(shared, work, keys, warp);
      }
    }
    const std::uint64_t key_operand = ptx::k_major(ptx::shared_address(keys));
    const float scale = *reinterpret_cast<const float*>(keys + own_scale);
    for (std::int32_t row = 0; kOne ? row == 0 : row < rows; row += kRows) {
      float dots[kColumns / 2];
      begin_multiply(dots, key_operand, query_operand + static_cast<std::uint64_t>(row * kHeads * kQueryDim / 16));
      const GroupQueries queries = shared.queries_of(group);
      if (!kOne) {
        lane_rows.set(p, queries, row, in_block);
        if constexpr (kSift) {
          lane_sift.set(row);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::pin(dots);
      if (kOne || row + kRows >= rows) {
        __syncwarp();
        if (lane_index() == 0) {
          shared.empty[place.stage].arrive();
        }
      }
      float sums[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float* own = dots + i * kHeads / 2;
        if constexpr (kOne) {
          sums[i] = sum_heads<kHeads, 1>(own, kept + i * kFours);
        } else {
          sums[i] = sum_heads<kHeads, 4>(own, weights_of(queries, row + i));
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; i += 2) {
        const float score = sum_lanes(sums[i], sums[i + 1 < kRows ? i + 1 : i]) * scale;
        const bool there = work.token < lane_rows.limit[i / 2];
        if (there) {
          ptx::store_streaming(lane_rows.out[i / 2] + work.token, score);
        }
        if constexpr (kSift) {
          lane_sift.look(row, i / 2, there, score, work.token + in_block);
        }
      }
    }
    if constexpr (kSift) {
      lane_sift.end_block();
    }
  }
  if constexpr (kSift) {
    lane_sift.finish();
  }
}

}  // namespace echo
