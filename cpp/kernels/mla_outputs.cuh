#pragma once
// Outputs of a consuming warp, from registers as the tensor cores leave them: in pieces of 16 heads x 16 columns.

#include <cstdint>

#include "kernels/elements.cuh"
#include "kernels/mla_heads.cuh"

namespace echo::mla {

inline constexpr std::uint32_t kPieces = kColumns / 16;  ///< of a warp's columns

/// Of a thread in a piece, as the tensor cores leave them.
struct Values {
  float of[8];
};

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

  /// Writes `count` of up to kCount pieces from number `first` on, the i-th of which is `piece(i)`. The code for either
  /// type lies together.
  template <std::uint32_t kCount, typename Piece>
  __device__ __forceinline__ void store(std::uint32_t first, std::uint32_t count, const Piece& piece) const {
    if (dtype == DType::f32) {
      store_as<float, kCount>(first, count, piece);
    } else {
      store_as<std::uint16_t, kCount>(first, count, piece);
    }
  }

 private:
  template <typename Element, std::uint32_t kCount, typename Piece>
  __device__ __forceinline__ void store_as(std::uint32_t first, std::uint32_t count, const Piece& piece) const {
    Element* const to = static_cast<Element*>(out) + at + first * 16;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const Values values = piece(i);
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        store_head(to + head * 8 * kLatent + i * 16, values.of + 2 * head, i < count && head * 8 < heads);
      }
    }
  }
  /// A head's four values of a piece. Two lanes exchange halves, so that each writes four columns next to each other,
  /// and four lanes a sector.
  static __device__ __forceinline__ void store_head(float* to, const float* values, bool real) {
    const bool odd = lane_index() % 2 != 0;
    const float2 first = make_float2(values[0], values[1]);
    const float2 second = make_float2(values[4], values[5]);
    const float2 give = odd ? first : second;
    const float2 kept = odd ? second : first;
    const float2 got = make_float2(__shfl_xor_sync(kAllLanes, give.x, 1), __shfl_xor_sync(kAllLanes, give.y, 1));
    if (real) {
      *reinterpret_cast<float4*>(to) =
          odd ? make_float4(got.x, got.y, kept.x, kept.y) : make_float4(kept.x, kept.y, got.x, got.y);
    }
  }
  static __device__ __forceinline__ void store_head(std::uint16_t* to, const float* values, bool real) {
    const bool odd = lane_index() % 2 != 0;
    const std::uint32_t first = ptx::to_bf16x2(values[0], values[1]);
    const std::uint32_t second = ptx::to_bf16x2(values[4], values[5]);
    const std::uint32_t kept = odd ? second : first;
    const std::uint32_t got = __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
    if (real) {
      *reinterpret_cast<uint2*>(to) = odd ? make_uint2(got, kept) : make_uint2(kept, got);
    }
  }
};

/// The sums of weights of the thread's heads over both warpgroups' halves of the tiles; nobody reads the query any
/// more.
__device__ __forceinline__ void exchange_sums(const Attention& attention, std::uint32_t group, Shared& shared,
                                              float (&sums)[2]) {
  const std::uint32_t heads[2] = {first_head(), first_head() + 8};
  const float own[2] = {sum_of_head(attention.sum[0]), sum_of_head(attention.sum[1])};
  if (lane_index() % 4 == 0) {
    shared.sums[group][heads[0]] = own[0];
    shared.sums[group][heads[1]] = own[1];
  }
  meet_aligned(kConsumersBarrier, kConsumers);
  sums[0] = shared.sums[0][heads[0]] + shared.sums[1][heads[0]];
  sums[1] = shared.sums[0][heads[1]] + shared.sums[1][heads[1]];
}

/// Of a sum of weights; where nothing is selected, outputs are 0.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0F ? 0.0F : __frcp_rn(sum); }

/// The outputs of a selection that is one split.
__device__ __forceinline__ void write_alone(const Attention& attention, const float (&sums)[2],
                                            const Outputs& outputs) {
  const float factors[2] = {inverse_of(sums[0]), inverse_of(sums[1])};
  outputs.store<kPieces>(0, kPieces, [&](std::uint32_t piece) {
    Values values;
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) {
      values.of[i] = attention.out[8 * piece + i] * factors[head_of(static_cast<int>(i))];
    }
    return values;
  });
}

}  // namespace echo::mla
