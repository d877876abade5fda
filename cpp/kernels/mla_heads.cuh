#pragma once
// What a consuming warpgroup does with a tile: 64 heads in the rows of its fragments (see ptx/wgmma.cuh), so a thread
// has parts of two heads, r = 16 warp + lane / 4 and r + 8. Of each tile, warpgroup w takes the logits of half w, and
// of the output columns 256 w to 256 w + 255; it hands the other one its softmax weights through shared memory.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/elements.cuh"
#include "kernels/mla_tile.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace echo::mla {

inline constexpr float kLog2OfE = 1.44269504F;  ///< weights are powers of two

inline constexpr std::uint32_t kColumns = kLatent / 2;  ///< of the output, of a warpgroup
inline constexpr int kOutputs = kHeads * kColumns / kGroup;
inline constexpr int kLogits = kHeads * kHalf / kGroup;
inline constexpr int kSteps = kHalf / 16;  ///< products over the entries of a half

/// A thread's part of one query's attention: of its two heads the reference that weights are relative to (the
/// maximum so far), its share of the sum of weights, and its outputs.
struct Attention {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
  float out[kOutputs] = {};
};

/// Head of register `i` of a fragment: 0 for the thread's first, 1 for its second.
__device__ __forceinline__ constexpr int head_of(int i) { return i >> 1 & 1; }

__device__ __forceinline__ std::uint32_t group_thread() { return threadIdx.x % kGroup; }
/// The thread's first head; the second is 8 further.
__device__ __forceinline__ std::uint32_t first_head() {
  return group_thread() / kWarp * 16 + static_cast<std::uint32_t>(lane_index()) / 4;
}
/// The row whose address the thread gives to store_matrices, and which of two neighbouring chunks of it.
__device__ __forceinline__ std::uint32_t stored_head() {
  return group_thread() / kWarp * 16 + static_cast<std::uint32_t>(lane_index()) % 16;
}
__device__ __forceinline__ std::uint32_t stored_chunk() { return static_cast<std::uint32_t>(lane_index()) / 16; }

/// Largest of the four lanes that share a head.
__device__ __forceinline__ float most_of_head(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ __forceinline__ float sum_of_head(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

/// Starts to bring the queries of heads [first_head, first_head + 64) of a row to shared memory, by all consumers: bf16
/// arrives by wait_copies(), f32 is rounded to bf16 at once. Heads that the model does not have are 0.
__device__ __forceinline__ void load_query(const AttendParams& p, std::int64_t row, std::int32_t first,
                                           Shared& shared) {
  constexpr std::uint32_t kHeadsAtOnce = kConsumers / 8;
  const std::uint32_t chunk = threadIdx.x % 8;
  const std::uint32_t head = threadIdx.x / 8;
  const std::uint32_t to = ptx::shared_address(shared.query) + chunk_place(head, chunk);
  const std::int64_t begin = row * p.shape.query_heads + first;
  const auto real = [&](std::uint32_t round) {
    return first + static_cast<std::int32_t>(head + round * kHeadsAtOnce) < p.shape.query_heads;
  };
  if (p.q_dtype == DType::bf16) {
#pragma unroll
    for (std::uint32_t round = 0; round < kHeads / kHeadsAtOnce; ++round) {
      // The source of a head that is not there is not read, but has to be an address.
      const std::int64_t source = real(round) ? begin + head + round * kHeadsAtOnce : 0;
      const auto* from = static_cast<const std::uint16_t*>(p.q) + source * kRowDim + chunk * 8;
#pragma unroll
      for (std::uint32_t atom = 0; atom < kAtoms; ++atom) {
        ptx::copy_async(to + round * kHeadsAtOnce * 128 + atom * kAtomBytes, from + atom * 64, real(round));
      }
    }
    return;
  }
#pragma unroll 1
  for (std::uint32_t round = 0; round < kHeads / kHeadsAtOnce; ++round) {
    const auto* from = static_cast<const float*>(p.q) + (begin + head + round * kHeadsAtOnce) * kRowDim + chunk * 8;
#pragma unroll 1
    for (std::uint32_t atom = 0; atom < kAtoms; ++atom) {
      const uint4 none = make_uint4(0, 0, 0, 0);
      const uint4 a = real(round) ? ptx::load(from + atom * 64) : none;
      const uint4 b = real(round) ? ptx::load(from + atom * 64 + 4) : none;
      ptx::store_shared(to + round * kHeadsAtOnce * 128 + atom * kAtomBytes,
                        make_uint4(pack_bf16(float_of(a.x), float_of(a.y)), pack_bf16(float_of(a.z), float_of(a.w)),
                                   pack_bf16(float_of(b.x), float_of(b.y)), pack_bf16(float_of(b.z), float_of(b.w))));
    }
  }
}

/// Brings what load_query will take into the L2 cache.
__device__ __forceinline__ void prefetch_query(const AttendParams& p, std::int64_t row, std::int32_t first) {
  const auto heads = static_cast<std::uint32_t>(min(kHeads, p.shape.query_heads - first));
  const std::uint32_t element = p.q_dtype == DType::bf16 ? 2 : 4;
  const std::int64_t begin = (row * p.shape.query_heads + first) * kRowDim;
  ptx::prefetch(static_cast<const std::byte*>(p.q) + begin * element, heads * kRowDim * element);
}

/// Starts Q K^T of one half; one committed group.
__device__ __forceinline__ void start_logits(const Shared& shared, std::uint32_t half, float (&logits)[kLogits]) {
  const std::uint64_t query = ptx::worked_out_here(ptx::k_major(ptx::shared_address(shared.query)));
  const std::uint64_t rows = ptx::worked_out_here(ptx::k_major(ptx::shared_address(shared.rows[half])));
  ptx::pin(logits);
  ptx::wgmma_fence();
#pragma unroll
  for (std::uint32_t atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (std::uint32_t step = 0; step < 4; ++step) {
      const std::uint32_t offset = atom * kAtomBytes + step * 32;
      ptx::wgmma_64x64(logits, ptx::advanced(query, offset), ptx::advanced(rows, offset), offset != 0);
    }
  }
  ptx::wgmma_commit();
}

/// Scales the logits (to powers of two), empties those of entries without a row, and returns each head's largest. Of
/// full halves, `kBehind`: before they are scaled, which then goes on while lanes exchange it. Bits are the same.
template <bool kBehind>
__device__ __forceinline__ void scale_logits(float (&logits)[kLogits], float scale, std::uint64_t entries,
                                             float (&most)[2]) {
  if constexpr (!kBehind) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      logits[i] *= scale;
    }
  }
  if (entries != ~0ULL || (kBehind && !(scale > 0.0F))) {
    const std::uint64_t mine = entries >> (lane_index() % 4 * 2);
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      const bool there = (mine >> (i / 4 * 8 + i % 2) & 1U) != 0;
      logits[i] = there ? logits[i] * (kBehind ? scale : 1.0F) : -INFINITY;
    }
    scale = 1.0F;
  }
  most[0] = most[1] = -INFINITY;
#pragma unroll
  for (int i = 0; i < kLogits; ++i) {
    most[head_of(i)] = fmaxf(most[head_of(i)], logits[i]);
  }
  most[0] = most_of_head(most[0]);
  most[1] = most_of_head(most[1]);
  if constexpr (kBehind) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      logits[i] = __fmul_rn(logits[i], scale);  // rounded before a reference is subtracted
    }
    most[0] = __fmul_rn(most[0], scale);
    most[1] = __fmul_rn(most[1], scale);
  }
}

/// Moves to other references; returns in `factors` what sums and outputs so far are multiplied by.
__device__ __forceinline__ void refer(Attention& attention, const float (&references)[2], float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Also where both are -inf, nothing having been selected so far.
    const bool same = attention.reference[i] == references[i];
    factors[i] = same ? 1.0F : ptx::exp2_approx(attention.reference[i] - references[i]);
    attention.reference[i] = references[i];
  }
}
__device__ __forceinline__ void rescale_sums(const float (&factors)[2], Attention& attention) {
  attention.sum[0] *= factors[0];
  attention.sum[1] *= factors[1];
}
/// `kIfAny`: only heads of which a lane of the warp has another factor than 1. That differs between the warps of a
/// warpgroup, which go the same way again behind it.
template <bool kIfAny>
__device__ __forceinline__ void rescale(const float (&factors)[2], float (&out)[kOutputs]) {
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    if (!kIfAny || __any_sync(kAllLanes, factors[head] != 1.0F)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (head_of(i) == head) {
          out[i] *= factors[head];
        }
      }
    }
  }
}

/// Softmax weights of a half in bf16, as the A operands of the products with V.
struct Weights {
  std::uint32_t steps[kSteps][4];

  /// 2^(logit - reference). What the sum counts, here if `now`, else with add_to(), are the rounded weights, so that
  /// they and the outputs stay in proportion.
  template <bool kNow>
  __device__ __forceinline__ Weights(const float (&logits)[kLogits], const float (&references)[2], float (&sum)[2],
                                     std::bool_constant<kNow> /*now*/) {
    float origin[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      origin[i] = references[i] == -INFINITY ? 0.0F : references[i];  // no inf - inf
    }
#pragma unroll
    for (int i = 0; i < kLogits; i += 2) {
      const int head = head_of(i);
      const float first = ptx::exp2_approx(logits[i] - origin[head]);
      const float second = ptx::exp2_approx(logits[i + 1] - origin[head]);
      const std::uint32_t pair = ptx::to_bf16x2(first, second);
      if constexpr (kNow) {
        sum[head] += float_of(pair << 16) + float_of(pair & 0xFFFF0000U);
      }
      steps[i / 8][i / 2 % 4] = pair;
    }
  }
  __device__ __forceinline__ void add_to(float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < kLogits; i += 2) {
      const std::uint32_t pair = steps[i / 8][i / 2 % 4];
      sum[head_of(i)] += float_of(pair << 16) + float_of(pair & 0xFFFF0000U);
    }
  }
  /// Puts them where the other warpgroup finds them: the rope atom of their half.
  __device__ __forceinline__ void store(std::uint32_t atom) const {
#pragma unroll
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      ptx::store_matrices(atom + chunk_place(stored_head(), 2 * step + stored_chunk()), steps[step][0], steps[step][1],
                          steps[step][2], steps[step][3]);
    }
  }
};

/// V of a half for the columns of a warpgroup.
__device__ __forceinline__ std::uint64_t values_of(const Shared& shared, std::uint32_t half, std::uint32_t group) {
  const std::uint32_t columns = ptx::shared_address(shared.rows[half]) + group * (kColumns / 64) * kAtomBytes;
  return ptx::worked_out_here(ptx::mn_major(columns, kAtomBytes));
}
/// Starts out += weights V for a warpgroup's columns; one committed group.
__device__ __forceinline__ void add_rows(const Weights& weights, std::uint64_t rows, float (&out)[kOutputs]) {
  ptx::pin(out);
  ptx::wgmma_fence();
#pragma unroll
  for (std::uint32_t step = 0; step < kSteps; ++step) {
    const std::uint64_t values = ptx::advanced(rows, step * 2048);
    ptx::wgmma_64x128<0>(out, weights.steps[step], values);
    ptx::wgmma_64x128<128>(out, weights.steps[step], ptx::advanced(values, 2 * kAtomBytes));
  }
  ptx::wgmma_commit();
}
/// The same with the weights of the other warpgroup.
__device__ __forceinline__ void add_rows(std::uint64_t weights, std::uint64_t rows, float (&out)[kOutputs]) {
  ptx::pin(out);
  ptx::wgmma_fence();
#pragma unroll
  for (std::uint32_t step = 0; step < kSteps; ++step) {
    const std::uint64_t values = ptx::advanced(rows, step * 2048);
    ptx::wgmma_64x128<0>(out, ptx::advanced(weights, step * 32), values);
    ptx::wgmma_64x128<128>(out, ptx::advanced(weights, step * 32), ptx::advanced(values, 2 * kAtomBytes));
  }
  ptx::wgmma_commit();
}

}  // namespace echo::mla
