#pragma once
// Outputs of a consuming warp, from registers as the tensor cores leave them: in pieces of 16 heads x 16 columns.

#include <cstdint>

#include "kernels/elements.cuh"
#include "kernels/mla_heads.cuh"

namespace echo::mla {

inline constexpr std::uint32_t kPieces = kColumns / 16;  ///< of a warp's columns

/// Where a warp's outputs go.
struct Outputs {
  void* out;
  DType dtype;
  std::int64_t at;     ///< element of the thread's first head and of its first column in piece 0
  std::int32_t heads;  ///< that exist from the thread's first one on

  __device__ __forceinline__ Outputs(const AttendParams& p, std::int64_t row, std::int32_t first)
      : out(p.out), dtype(p.out_dtype) {
    const auto head = first + static_cast<std::int32_t>(first_head());
    const std::uint32_t lane = static_cast<std::uint32_t>(lane_index()) % 4;
    const std::uint32_t column = threadIdx.x / kGroup * kColumns + lane % 2 * 8 + lane / 2 * 4;
    at = (row * p.shape.query_heads + head) * kLatent + column;
    heads = p.shape.query_heads - head;
  }

  /// Writes a piece, eight values as the tensor cores leave them. Two lanes exchange halves, so that each writes four
  /// columns next to each other, and four lanes a sector.
  __device__ __forceinline__ void store(std::uint32_t piece, const float (&values)[8], bool real = true) const {
    const bool odd = lane_index() % 2 != 0;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float* first = values + 2 * head;
      const float* second = first + 4;
      const std::int64_t to = at + head * 8 * kLatent + piece * 16;
      const float give[2] = {odd ? first[0] : second[0], odd ? first[1] : second[1]};
      const float keep[2] = {odd ? second[0] : first[0], odd ? second[1] : first[1]};
      if (dtype == DType::f32) {
        const float got[2] = {__shfl_xor_sync(kAllLanes, give[0], 1), __shfl_xor_sync(kAllLanes, give[1], 1)};
        if (real && head * 8 < heads) {
          *reinterpret_cast<float4*>(static_cast<float*>(out) + to) =
              odd ? make_float4(got[0], got[1], keep[0], keep[1]) : make_float4(keep[0], keep[1], got[0], got[1]);
        }
      } else {
        const std::uint32_t kept = ptx::to_bf16x2(keep[0], keep[1]);
        const std::uint32_t got = __shfl_xor_sync(kAllLanes, ptx::to_bf16x2(give[0], give[1]), 1);
        if (real && head * 8 < heads) {
          *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(out) + to) =
              odd ? make_uint2(got, kept) : make_uint2(kept, got);
        }
      }
    }
  }
};

/// Of a sum of weights; where nothing is selected, outputs are 0.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0F ? 0.0F : __frcp_rn(sum); }

/// The outputs of a selection that is one split.
__device__ __forceinline__ void write_alone(const Attention& attention, const float (&sums)[2],
                                            const Outputs& outputs) {
  const float factors[2] = {inverse_of(sums[0]), inverse_of(sums[1])};
#pragma unroll
  for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
    float values[8];
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) {
      values[i] = attention.out[8 * piece + i] * factors[head_of(static_cast<int>(i))];
    }
    outputs.store(piece, values);
  }
}

}  // namespace echo::mla
