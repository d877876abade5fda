#pragma once
// The splits of a query put together on chip: each block of the cluster stages its sums [64 heads, 512] in its own
// shared memory and writes the output of its part of the heads, reading them from all blocks in the order of the
// splits.
//
// Sums travel as f16 times a power of two per head and half of the columns, chosen so that the largest is in
// [2^14, 2^15): an error of 2^-12 of the largest value of a head, less than what bf16 weights cost, for half of the
// bytes between multiprocessors, which are what this takes time for (64 KB per block).

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/elements.cuh"
#include "kernels/mla_heads.cuh"

namespace echo::mla {

/// 2^e that brings a value of this size into [2^14, 2^15), and its inverse.
struct Unit {
  float up;
  float down;

  __device__ __forceinline__ explicit Unit(float largest) {
    constexpr std::uint32_t kLeast = 30;  // of the exponent, for both to be normal
    constexpr std::uint32_t kMost = 254;
    const std::uint32_t exponent = min(max(bits_of(largest) >> 23, kLeast), kMost);
    up = float_of((127U + 127U + 14U - exponent) << 23);
    down = float_of((exponent - 14U) << 23);
  }
};

/// Leaves a warpgroup's sums and shares where the other blocks read them.
__device__ __forceinline__ void stage(const Attention& attention, std::uint32_t group, Shared& shared) {
  float largest[2] = {};
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    largest[head_of(i)] = fmaxf(largest[head_of(i)], fabsf(attention.out[i]));
  }
  const Unit units[2] = {Unit(most_of_head(largest[0])), Unit(most_of_head(largest[1]))};
  const float sums[2] = {sum_of_head(attention.sum[0]), sum_of_head(attention.sum[1])};
  if (lane_index() % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.shares[group][first_head() + 8 * static_cast<std::uint32_t>(i)] = {attention.reference[i], sums[i],
                                                                                units[i].down, 0.0F};
    }
  }
  const std::uint32_t to = ptx::shared_address(shared.rows[1]);
#pragma unroll
  for (std::uint32_t step = 0; step < kColumns / 16; ++step) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float up = units[i % 2].up;
      const std::uint32_t at = 8 * step + 2 * static_cast<std::uint32_t>(i);
      pairs[i] = ptx::to_f16x2(attention.out[at] * up, attention.out[at + 1] * up);
    }
    const std::uint32_t chunk = group * (kColumns / 8) + 2 * step + stored_chunk();
    ptx::store_matrices(to + staged_offset(stored_head(), chunk), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

inline constexpr std::uint32_t kParts = 16;  ///< staged sums that a warp combines, a split's of a head each

/// Which those are: of some heads those of all splits, the block's own first so that not all blocks read from the same
/// one.
template <std::uint32_t kSplits>
struct Parts {
  std::uint32_t first_head;
  std::uint32_t rank;

  __device__ __forceinline__ std::uint32_t head(std::uint32_t part) const { return first_head + part / kSplits; }
  __device__ __forceinline__ std::uint32_t split(std::uint32_t part) const { return (part + rank) % kSplits; }
};

/// What the parts are multiplied by, in half of the columns: lanes i and i + 16 have that of part i.
template <std::uint32_t kSplits>
__device__ __forceinline__ float part_factor(const Shared& shared, const Parts<kSplits>& parts,
                                             std::uint32_t column_half) {
  const std::uint32_t part = static_cast<std::uint32_t>(lane_index()) % kParts;
  const auto share = [&](std::uint32_t group) {
    return ptx::load_remote(
        ptx::remote_address(ptx::shared_address(&shared.shares[group][parts.head(part)]), parts.split(part)));
  };
  const uint4 first = share(0);
  const uint4 second = share(1);
  const float reference = float_of(first.x);
  const float unit = float_of(column_half == 0 ? first.z : second.z);
  float overall = reference;
#pragma unroll
  for (int step = 1; step < static_cast<int>(kSplits); step *= 2) {
    overall = fmaxf(overall, __shfl_xor_sync(kAllLanes, overall, step));
  }
  const float origin = overall == -INFINITY ? 0.0F : overall;  // no inf - inf where nothing is selected
  const float weight = ptx::exp2_approx(reference - origin);
  float total = weight * (float_of(first.y) + float_of(second.y));
#pragma unroll
  for (int step = 1; step < static_cast<int>(kSplits); step *= 2) {
    total += __shfl_xor_sync(kAllLanes, total, step);
  }
  return total == 0.0F ? 0.0F : __fdividef(weight * unit, total);
}

__device__ __forceinline__ void add_halves(std::uint32_t pair, float factor, float& first, float& second) {
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  first = fmaf(factor, values.x, first);
  second = fmaf(factor, values.y, second);
}

/// Writes eight neighbouring outputs, aligned to their size.
__device__ __forceinline__ void store_outputs(void* out, DType dtype, std::int64_t at, const float (&values)[8]) {
  if (dtype == DType::f32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
    to[0] = make_float4(values[0], values[1], values[2], values[3]);
    to[1] = make_float4(values[4], values[5], values[6], values[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(out) + at) =
        make_uint4(ptx::to_bf16x2(values[0], values[1]), ptx::to_bf16x2(values[2], values[3]),
                   ptx::to_bf16x2(values[4], values[5]), ptx::to_bf16x2(values[6], values[7]));
  }
}

/// Writes the outputs of the block's part of heads [first, first + 64) of a row. A warp has a quarter of them and half
/// of the columns, a lane eight columns; all that it reads is on its way at once.
template <std::uint32_t kSplits>
__device__ __forceinline__ void combine_of(const AttendParams& p, std::int64_t row, std::int32_t first,
                                           const Shared& shared, std::uint32_t rank) {
  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::uint32_t column_half = warp % 2;
  const std::uint32_t chunk = column_half * kWarp + static_cast<std::uint32_t>(lane_index());
  const std::uint32_t staged = ptx::shared_address(shared.rows[1]);
  const Parts<kSplits> parts{(4 * rank + warp / 2) * (kParts / kSplits), rank};
  uint4 sums[kParts];
#pragma unroll
  for (std::uint32_t part = 0; part < kParts; ++part) {
    const std::uint32_t place = staged + staged_offset(parts.head(part), chunk);
    sums[part] = ptx::load_remote(ptx::remote_address(place, parts.split(part)));
  }
  const float factors = part_factor(shared, parts, column_half);
  const std::int64_t to = (row * p.shape.query_heads + first + parts.first_head) * kLatent + chunk * 8;
  const std::int32_t heads = p.shape.query_heads - first - static_cast<std::int32_t>(parts.first_head);
  float values[8] = {};
#pragma unroll
  for (std::uint32_t part = 0; part < kParts; ++part) {
    const float factor = __shfl_sync(kAllLanes, factors, static_cast<int>(part));
    add_halves(sums[part].x, factor, values[0], values[1]);
    add_halves(sums[part].y, factor, values[2], values[3]);
    add_halves(sums[part].z, factor, values[4], values[5]);
    add_halves(sums[part].w, factor, values[6], values[7]);
    if (part % kSplits == kSplits - 1) {
      if (static_cast<std::int32_t>(part / kSplits) < heads) {
        store_outputs(p.out, p.out_dtype, to + part / kSplits * kLatent, values);
      }
#pragma unroll
      for (float& value : values) {
        value = 0.0F;
      }
    }
  }
}
__device__ __forceinline__ void combine(const AttendParams& p, std::int64_t row, std::int32_t first,
                                        const Shared& shared, std::uint32_t rank, std::uint32_t splits) {
  switch (splits) {
    case 1:
      return combine_of<1>(p, row, first, shared, rank);
    case 2:
      return combine_of<2>(p, row, first, shared, rank);
    case 4:
      return combine_of<4>(p, row, first, shared, rank);
    default:
      return combine_of<kMaxSplits>(p, row, first, shared, rank);
  }
}

}  // namespace echo::mla
