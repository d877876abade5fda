#pragma once
// The queries of groups of rows in shared memory, quantised as index_queries.cu does it and laid out as the tensor
// cores read them. A warp takes four heads at once: eight lanes a head, 2 x 8 of its 128 dimensions a lane.

#include <cstdint>

#include "kernels/elements.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/score_groups.cuh"

namespace echo {

inline constexpr int kQueryDim{ptx::kSwizzleRow};        ///< of e4m3, a row of an operand
inline constexpr int kHeadLanes = 8;                     ///< that share a head
inline constexpr int kHeadsAtOnce = kWarp / kHeadLanes;  ///< of a warp

/// Where the queries of one group lie.
struct GroupQueries {
  std::byte* codes;       ///< operand of group rows x heads rows
  float* weights;         ///< [group rows, heads] in the order of weight_place, half the weight
  std::int32_t* lengths;  ///< [group rows] scores that the row gets
  std::int32_t* rows;     ///< [2] first row of the group, counted from the first of the row block, and how many
};

/// Weights lie in the order in which lanes need them: four at once, next to those of the other lanes of a row.
__device__ inline std::int32_t weight_place(std::int32_t head) {
  return head / 16 * 16 + head % 8 / 2 * 4 + head % 16 / 8 * 2 + head % 2;
}

/// What a lane loads of a head: dimensions [8 l, 8 l + 8) and [64 + 8 l, 72 + 8 l), as they lie in memory.
template <typename T>
struct HeadPart;

template <>
struct HeadPart<std::uint16_t> {  // bf16
  uint4 words[2] = {};

  __device__ void load(const std::uint16_t* head) {
    const auto* source = reinterpret_cast<const uint4*>(head) + lane_index() % kHeadLanes;
    words[0] = source[0];
    words[1] = source[kHeadLanes];
  }
  /// Largest magnitude; NaN values do not count.
  __device__ float amax() const {
    const std::uint32_t pairs[8] = {words[0].x, words[0].y, words[0].z, words[0].w,
                                    words[1].x, words[1].y, words[1].z, words[1].w};
    std::uint32_t largest = 0;
#pragma unroll
    for (const std::uint32_t pair : pairs) {
      largest = larger(largest, pair & 0x7FFF7FFFU);
    }
#pragma unroll
    for (int step = kHeadLanes / 2; step > 0; step /= 2) {
      largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    return fmaxf(float_of(largest << 16), float_of(largest & 0xFFFF0000U));
  }
  __device__ void unpack(int half, float (&values)[8]) const {
    const std::uint32_t pairs[4] = {words[half].x, words[half].y, words[half].z, words[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = float_of(pairs[i] << 16);
      values[2 * i + 1] = float_of(pairs[i] & 0xFFFF0000U);
    }
  }

 private:
  /// Of two bf16 each.
  __device__ static std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
    std::uint32_t result = 0;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
};

template <>
struct HeadPart<float> {
  float4 words[4] = {};

  __device__ void load(const float* head) {
    const auto* source = reinterpret_cast<const float4*>(head) + lane_index() % kHeadLanes * 2;
    words[0] = source[0];
    words[1] = source[1];
    words[2] = source[2 * kHeadLanes];
    words[3] = source[2 * kHeadLanes + 1];
  }
  __device__ float amax() const {
    float largest = 0.0F;
#pragma unroll
    for (const float4& four : words) {
      largest = fmaxf(fmaxf(fmaxf(fmaxf(largest, fabsf(four.x)), fabsf(four.y)), fabsf(four.z)), fabsf(four.w));
    }
#pragma unroll
    for (int step = kHeadLanes / 2; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    return largest;
  }
  __device__ void unpack(int half, float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4& four = words[2 * half + i];
      values[4 * i] = four.x;
      values[4 * i + 1] = four.y;
      values[4 * i + 2] = four.z;
      values[4 * i + 3] = four.w;
    }
  }
};

/// Quantises a head: codes to shared memory, at a row of the operand; returns the head's scale. The conversion
/// instruction gives the codes of to_e4m3, but for the sign of a NaN, which no product keeps.
template <typename T>
__device__ float put_head(const HeadPart<T>& part, std::byte* codes, std::int32_t operand_row) {
  const float scale = power_of_two_scale(part.amax());
  const float inverse = float_of((254U << 23) - bits_of(scale));  // exact, like the division by a power of two
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float values[8];
    part.unpack(half, values);
    std::uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      words[i / 4] |= e4m3_pair(values[i] * inverse, values[i + 1] * inverse) << (i % 4 * 8);
    }
    const auto byte = static_cast<std::uint32_t>(half * kQueryDim / 2 + lane_index() % kHeadLanes * 8);
    *reinterpret_cast<uint2*>(codes + ptx::swizzled(static_cast<std::uint32_t>(operand_row), byte)) =
        make_uint2(words[0], words[1]);
  }
  return scale;
}

/// Loads the queries of a group's rows, by warp `warp` of `warps` that do so together; heads behind the model's get
/// zeros. `free` is called when the first heads are on their way, before anything is written. Ordinary writes to shared
/// memory: ptx::fence_proxy_async and a barrier have to follow.
template <int kHeads, int kAtOnce, typename T, typename Free>
__device__ void load_queries(const ScoreParams& p, const GroupRows& rows, const GroupQueries& to, int warp, int warps,
                             const KernelErrorView& errors, Free free) {
  constexpr int kPerRow = kHeads / kHeadsAtOnce;
  const std::int32_t count = rows.last - rows.first;
  const std::int32_t all = count * kPerRow;
  const std::int32_t lane_head = lane_index() / kHeadLanes;
  bool waited = false;
#pragma unroll 1
  for (std::int32_t begin = warp; begin < all; begin += warps * kAtOnce) {
    HeadPart<T> parts[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int32_t index = begin + i * warps;
      const std::int32_t head = index % kPerRow * kHeadsAtOnce + lane_head;
      weights[i] = 0.0F;
      if (index < all && head < p.shape.index_heads) {
        const std::int64_t source =
            static_cast<std::int64_t>(rows.first + index / kPerRow) * p.shape.index_heads + head;
        parts[i].load(static_cast<const T*>(p.index_q) + source * kQueryDim);
        weights[i] = p.index_weights[source];
      }
    }
    if (!waited) {
      free();
      waited = true;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int32_t index = begin + i * warps;
      if (index < all) {
        const std::int32_t operand_row = index * kHeadsAtOnce + lane_head;
        const float scale = put_head(parts[i], to.codes, operand_row);
        if (lane_index() % kHeadLanes == 0) {
          // Half of it, because the sum is over x + |x|, which is twice relu(x) and keeps NaN.
          to.weights[operand_row / kHeads * kHeads + weight_place(operand_row % kHeads)] = weights[i] * scale * 0.5F;
        }
      }
    }
  }
  if (!waited) {
    free();
  }
  if (warp == warps - 1) {
#pragma unroll 1
    for (std::int32_t i = lane_index(); i < count; i += kWarp) {
      to.lengths[i] = length_of(p, rows.first + i, errors);
    }
    if (lane_index() == 0) {
      to.rows[0] = rows.first - p.block.first;
      to.rows[1] = count;
    }
  }
}

}  // namespace echo
