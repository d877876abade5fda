#pragma once
// A tile by two warpgroups in turns. Warpgroup w takes the logits of half w, and has output columns 256 w to 256 w +
// 255; it hands the other one its softmax weights through shared memory. While one takes a softmax, the tensor cores
// work for the other:
//
//   first    logits 0 | softmax 0 | outputs += half 0 |           | outputs += half 1
//   second        (next half arrives) | logits 1 | outputs += half 0 | softmax 1 | outputs += half 1
//
// References pass from half to half in order, so both warpgroups have the same. The first half may be overwritten while
// the second is still at work.

#include <cstdint>

#include "kernels/mla_heads.cuh"

namespace echo::mla {

/// The warpgroup is done with a half.
__device__ __forceinline__ void release(std::uint32_t half, Shared& shared) {
  if (lane_index() == 0) {
    shared.empty[half].arrive();
  }
}

/// Chooses the references of a half, the maxima so far, and tells the other warpgroup. References that lag behind would
/// save rescaling, but the largest weight of a head would be rounded too, not just 1: the largest error of a head then
/// grows from 1.9e-3 to 2.8e-3.
__device__ __forceinline__ void lead(std::uint32_t half, const float (&most)[2], Shared& shared, Attention& attention,
                                     float (&factors)[2]) {
  const float references[2] = {fmaxf(attention.reference[0], most[0]), fmaxf(attention.reference[1], most[1])};
  refer(attention, references, factors);
  if (lane_index() % 4 == 0) {
    shared.references[half][first_head()] = references[0];
    shared.references[half][first_head() + 8] = references[1];
  }
}
/// Takes over those that the other warpgroup chose.
__device__ __forceinline__ void follow(std::uint32_t half, const Shared& shared, Attention& attention) {
  const float references[2] = {shared.references[half][first_head()], shared.references[half][first_head() + 8]};
  float factors[2];
  refer(attention, references, factors);
  rescale(factors, attention.out);
}

/// The first warpgroup's turn; its half has arrived.
__device__ __forceinline__ void attend_first(float scale, std::uint64_t entries, std::uint32_t parity, Shared& shared,
                                             Attention& attention) {
  float logits[kLogits];
  start_logits(shared, 0, logits);
  ptx::wgmma_wait<0>();
  ptx::pin(logits);
  float most[2];
  scale_logits(logits, scale, entries, most);
  float factors[2];
  lead(0, most, shared, attention, factors);
  const Weights weights(logits, attention.reference, attention.sum);
  const std::uint32_t atom = ptx::shared_address(shared.rows[0]) + kRopeOffset;
  weights.store(atom);
  ptx::fence_proxy_async();
  announce_aligned(kFirstWeightsBarrier, kConsumers);
  rescale(factors, attention.out);
  add_rows(weights, values_of(shared, 0, 0), attention.out);
  ptx::wgmma_wait<0>();
  ptx::pin(attention.out);
  release(0, shared);

  join_aligned(kSecondWeightsBarrier, kConsumers);
  follow(1, shared, attention);
  shared.full[1].wait(parity);  // long so, but it is this wait that shows the rows to this warpgroup
  add_rows(ptx::k_major(ptx::shared_address(shared.rows[1]) + kRopeOffset), values_of(shared, 1, 0), attention.out);
  ptx::wgmma_wait<0>();
  ptx::pin(attention.out);
  release(1, shared);
}

/// The second warpgroup's.
__device__ __forceinline__ void attend_second(float scale, std::uint64_t entries, std::uint32_t parity, Shared& shared,
                                              Attention& attention) {
  float logits[kLogits];
  start_logits(shared, 1, logits);
  join_aligned(kFirstWeightsBarrier, kConsumers);
  ptx::wgmma_wait<0>();  // the compiler does not touch sums while products are in flight
  ptx::pin(logits);
  follow(0, shared, attention);
  shared.full[0].wait(parity);
  add_rows(ptx::k_major(ptx::shared_address(shared.rows[0]) + kRopeOffset), values_of(shared, 0, 1), attention.out);
  float most[2];
  scale_logits(logits, scale, entries, most);
  float factors[2];
  lead(1, most, shared, attention, factors);
  const Weights weights(logits, attention.reference, attention.sum);
  weights.store(ptx::shared_address(shared.rows[1]) + kRopeOffset);
  ptx::fence_proxy_async();
  announce_aligned(kSecondWeightsBarrier, kConsumers);
  ptx::wgmma_wait<0>();
  ptx::pin(attention.out);
  release(0, shared);
  rescale(factors, attention.out);
  add_rows(weights, values_of(shared, 1, 1), attention.out);
  ptx::wgmma_wait<0>();
  ptx::pin(attention.out);
  release(1, shared);
}

/// One tile of a consuming warpgroup.
__device__ __forceinline__ void attend_tile(float scale, std::uint32_t group, std::uint32_t parity, Shared& shared,
                                            Attention& attention) {
  shared.full[group].wait(parity);
  const Present present = shared.present[group];
  if (present.tile == 0) {
    shared.full[group ^ 1U].wait(parity);
    __syncwarp();
    release(0, shared);
    release(1, shared);
  } else if (group == 0) {
    attend_first(scale, present.entries, parity, shared, attention);
  } else {
    attend_second(scale, present.entries, parity, shared, attention);
  }
}

}  // namespace echo::mla
