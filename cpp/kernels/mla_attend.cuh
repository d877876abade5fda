#pragma once
// A half of a tile by two warpgroups. Warpgroup w takes the logits of half w of each tile, and has output columns
// 256 w to 256 w + 255; it hands the other one its softmax weights through shared memory. Halves are done in order,
// each as soon as it is there: rows come more slowly than they are worked on, and a half that is done can be refilled.
//
//   one     logits 0, softmax 0 | outputs += half 0 |                       | outputs += half 1
//   other                       | outputs += half 0 | logits 1, softmax 1   | outputs += half 1
//
// Where selections are one split (kWhole), references and factors are told before there are weights: the other
// warpgroup rescales meanwhile, and sums are added up behind the weights. Warps pass over heads that keep their
// reference. Bits are the same.
// The halves are a loop, 12.5 KB of code: with twice as much, a layer of 8 sessions took 1.3 us longer.
//
// References pass from half to half, so both warpgroups have the same. What a warpgroup does depends on nothing that
// its warps could see differently: all four have to start the same products.

#include <cstdint>
#include <type_traits>

#include "kernels/mla_heads.cuh"

namespace echo::mla {

/// The warpgroup is done with a half.
__device__ __forceinline__ void release(std::uint32_t half, Shared& shared) {
  __syncwarp();
  if (lane_index() == 0) {
    shared.empty[half].arrive();
  }
}

/// out += weights V is complete, and so is the half.
__device__ __forceinline__ void end_half(std::uint32_t half, Shared& shared, Attention& attention) {
  ptx::wgmma_wait<0>();
  ptx::pin(attention.out);
  release(half, shared);
}

__device__ __forceinline__ int weights_barrier(std::uint32_t half) { return kWeightsBarrier + static_cast<int>(half); }
__device__ __forceinline__ int told_barrier(std::uint32_t half) { return kToldBarrier + static_cast<int>(half); }

/// The thread's two factors of a half that were told.
__device__ __forceinline__ void load_factors(const Shared& shared, std::uint32_t half, float (&factors)[2]) {
  const std::uint32_t at = ptx::shared_address(&shared.factors[half][first_head()]);
  factors[0] = __int_as_float(ptx::load_shared_volatile(at));
  factors[1] = __int_as_float(ptx::load_shared_volatile(at + 8 * sizeof(float)));
}

/// The warpgroup's own half, which has arrived. References are the maxima so far: ones that lag behind would save
/// rescaling, but the largest weight of a head would be rounded too, not just 1, and the largest error of a head would
/// grow from 1.9e-3 to 2.8e-3.
template <bool kWhole>
__device__ __forceinline__ void attend_own(float scale, std::uint32_t half, std::uint64_t entries, Shared& shared,
                                           Attention& attention) {
  float logits[kLogits];
  start_logits(shared, half, logits);
  ptx::wgmma_wait<0>();
  ptx::pin(logits);
  float most[2];
  scale_logits<kWhole>(logits, scale, entries, most);
  const float references[2] = {fmaxf(attention.reference[0], most[0]), fmaxf(attention.reference[1], most[1])};
  float factors[2];
  refer(attention, references, factors);
  if (lane_index() % 4 == 0) {
    shared.references[half][first_head()] = references[0];
    shared.references[half][first_head() + 8] = references[1];
    if constexpr (kWhole) {
      shared.factors[half][first_head()] = factors[0];
      shared.factors[half][first_head() + 8] = factors[1];
    }
  }
  if constexpr (kWhole) {
    announce_aligned(told_barrier(half), kConsumers);
  } else {
    rescale_sums(factors, attention);
  }
  const Weights weights(logits, attention.reference, attention.sum, std::bool_constant<!kWhole>());
  weights.store(ptx::shared_address(shared.rows[half]) + kRopeOffset);
  ptx::fence_proxy_async();
  announce_aligned(weights_barrier(half), kConsumers);
  if constexpr (kWhole) {  // what the other warpgroup does not wait for; factors meanwhile took no registers
    load_factors(shared, half, factors);  // by a lane of this warp, whose accesses are in order
    rescale_sums(factors, attention);
    weights.add_to(attention.sum);
  }
  rescale<kWhole>(factors, attention.out);
  add_rows(weights, values_of(shared, half, half), attention.out);
  end_half(half, shared, attention);
}

/// The other warpgroup's: with its references and weights.
template <bool kWhole>
__device__ __forceinline__ void attend_other(std::uint32_t half, Shared& shared, Attention& attention) {
  join_aligned(kWhole ? told_barrier(half) : weights_barrier(half), kConsumers);
  const float references[2] = {shared.references[half][first_head()], shared.references[half][first_head() + 8]};
  float factors[2];
  if constexpr (kWhole) {
    load_factors(shared, half, factors);
    attention.reference[0] = references[0];
    attention.reference[1] = references[1];
  } else {
    refer(attention, references, factors);
  }
  rescale_sums(factors, attention);
  rescale<kWhole>(factors, attention.out);
  if constexpr (kWhole) {
    ptx::pin(attention.out);  // rescaled by now, not behind the wait
    join_aligned(weights_barrier(half), kConsumers);
  }
  const std::uint64_t weights = ptx::k_major(ptx::shared_address(shared.rows[half]) + kRopeOffset);
  add_rows(ptx::worked_out_here(weights), values_of(shared, half, half ^ 1U), attention.out);
  end_half(half, shared, attention);
}

/// One tile of consuming warpgroup `group`. `kWhole`: references are told before the weights are there, so that the
/// other warpgroup has rescaled by then.
template <bool kWhole>
__device__ __forceinline__ void attend_tile(float scale, std::uint32_t group, std::uint32_t parity, Shared& shared,
                                            Attention& attention) {
#pragma unroll 1  // once in the code: each layer fetches it anew
  for (std::uint32_t half = 0; half < kHalves; ++half) {
    shared.full[half].wait(parity);
    const std::uint64_t entries = shared.entries[half];
    ptx::fence_proxy_async();  // for what the gathering warps stored
    if (entries == 0) {
      release(half, shared);
    } else if (half == group) {
      attend_own<kWhole>(scale, half, entries, shared, attention);
    } else {
      attend_other<kWhole>(half, shared, attention);
    }
  }
}

}  // namespace echo::mla
