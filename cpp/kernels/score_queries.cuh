#pragma once
// The queries of a group of rows in shared memory, quantised as index_queries.cu does it and laid out as the tensor
// cores read them. Half a warp takes a head: 8 of its 128 dimensions per lane.

#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/elements.cuh"
#include "kernels/score_groups.cuh"
#include "kernels/warpgroup_mma.cuh"

namespace echo {

inline constexpr int kQueryDim = kMmaRowBytes;

/// Where the queries of one group lie.
struct GroupQueries {
  std::byte* codes;       ///< operand of group rows x heads rows
  float* weights;         ///< [group rows, heads] in the order of weight_place, half the weight
  std::int32_t* lengths;  ///< [group rows] scores that the row gets
};

/// Weights lie in the order in which lanes need them: four at once, next to those of the other lanes of a row.
__device__ inline std::int32_t weight_place(std::int32_t head) {
  return head / 16 * 16 + head % 8 / 2 * 4 + head % 16 / 8 * 2 + head % 2;
}

/// 8 elements of an f32 or bf16 array, both aligned to 16 bytes, as they lie in memory.
struct QueryPiece {
  static constexpr int kElements = 8;

  uint4 words[2] = {};

  __device__ void load(const void* array, DType dtype, std::int64_t index) {
    if (dtype == DType::f32) {
      const auto* source = reinterpret_cast<const uint4*>(static_cast<const float*>(array) + index);
      words[0] = source[0];
      words[1] = source[1];
    } else {
      words[0] = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(array) + index);
    }
  }

  __device__ void unpack(DType dtype, float (&values)[kElements]) const {
    const std::uint32_t all[kElements] = {words[0].x, words[0].y, words[0].z, words[0].w,
                                          words[1].x, words[1].y, words[1].z, words[1].w};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const std::uint32_t pair = all[i / 2];
      values[i] = float_of(dtype == DType::f32 ? all[i] : i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000U);
    }
  }
};

/// Quantises a head, 8 dimensions per lane of half a warp: codes to shared memory; returns the head's scale. The
/// conversion instruction gives the codes of to_e4m3, but for the sign of a NaN, which no product keeps.
__device__ inline float put_query(const QueryPiece& piece, DType dtype, std::byte* codes, std::int32_t operand_row) {
  constexpr int kHalf = kWarp / 2;
  float values[QueryPiece::kElements];
  piece.unpack(dtype, values);
  float amax = 0.0F;
#pragma unroll
  for (const float value : values) {
    amax = amax_with(amax, value);
  }
#pragma unroll
  for (int step = kHalf / 2; step > 0; step /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
  }
  const float scale = power_of_two_scale(amax);
  const float inverse = float_of((254U << 23) - bits_of(scale));  // exact, like the division by a power of two
  std::uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < QueryPiece::kElements; i += 2) {
    const float2 pair = make_float2(values[i] * inverse, values[i + 1] * inverse);
    const std::uint32_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    words[i / 4] |= two << (i % 4 * 8);
  }
  const auto byte = static_cast<std::uint32_t>(lane_index() % kHalf * QueryPiece::kElements);
  *reinterpret_cast<uint2*>(codes + swizzled(static_cast<std::uint32_t>(operand_row), byte)) =
      make_uint2(words[0], words[1]);
  return scale;
}

/// Loads the queries of a group's rows, by warp `warp` of `warps` that do so together; heads behind the model's get
/// zeros. Ordinary writes to shared memory: publish_shared_writes and a barrier have to follow.
template <int kHeads>
__device__ void load_queries(const ScoreParams& p, GroupRows rows, int warp, int warps, const GroupQueries& queries,
                             const KernelErrorView& errors) {
  constexpr int kHalf = kWarp / 2;
  constexpr int kAtOnce = 4;  ///< pieces of a lane in flight
  const std::int32_t count = rows.last - rows.first;
  for (std::int32_t i = warp * kWarp + lane_index(); i < count; i += warps * kWarp) {
    queries.lengths[i] = length_of(p, rows.first + i, errors);
  }
  const std::int32_t pairs = count * kHeads / 2;
  for (std::int32_t begin = warp; begin < pairs; begin += warps * kAtOnce) {
    QueryPiece pieces[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int32_t query = (begin + i * warps) * 2 + lane_index() / kHalf;
      const std::int32_t head = query % kHeads;
      weights[i] = 0.0F;
      if (query < count * kHeads && head < p.shape.index_heads) {
        const std::int64_t source = static_cast<std::int64_t>(rows.first + query / kHeads) * p.shape.index_heads + head;
        pieces[i].load(p.index_q, p.index_q_dtype, source * kQueryDim + lane_index() % kHalf * QueryPiece::kElements);
        weights[i] = p.index_weights[source];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i * warps < pairs) {
        const std::int32_t query = (begin + i * warps) * 2 + lane_index() / kHalf;
        const float scale = put_query(pieces[i], p.index_q_dtype, queries.codes, query);
        if (lane_index() % kHalf == 0) {
          // Half of it, because the sum is over x + |x|, which is twice relu(x) and keeps NaN.
          queries.weights[query / kHeads * kHeads + weight_place(query % kHeads)] = weights[i] * scale * 0.5F;
        }
      }
    }
  }
}

}  // namespace echo
