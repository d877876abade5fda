#pragma once
// Which tokens of a row may be selected: a bound from a sample of the scores, and the list of all that reach it.
//
// The sample is two neighbours at a hashed place of each of `strata` equal parts of the row: no period of the scores
// meets it, and a run of high ones has its share of it. The bound is a score of the sample, of a rank so low that all
// k tokens hardly ever fail to reach it: of m expected among them, the sample has m +- sqrt(2 m), as neighbours
// are alike; four times that is allowed. A guess that decides nothing but speed.

#include "kernels/select_list.cuh"

namespace echo::top_k {

inline constexpr int kVectors = 4;  ///< of four scores that a thread has in flight
inline constexpr std::int32_t kVectorScores = 4;
inline constexpr std::int32_t kBatch = kThreads * kVectors * kVectorScores;
inline constexpr std::int32_t kLongRow = 1 << 18;

/// The row is sampled in 2^bits parts, two scores of each.
__device__ inline int strata_bits_of(std::int32_t length) { return length < kLongRow ? 10 : 12; }

/// Of the samples, the one of this rank is the bound.
__device__ inline std::int32_t bound_rank(std::int32_t samples, std::int32_t length, std::int32_t k) {
  const float expected = static_cast<float>(samples) * static_cast<float>(k) / static_cast<float>(length);
  return min(samples, static_cast<std::int32_t>(expected + 4.0F * sqrtf(2.0F * expected)) + 4);
}

__device__ inline std::uint32_t scrambled(std::uint32_t x) {
  x = (x ^ (x >> 15)) * 0x2C1B3C6DU;
  x = (x ^ (x >> 12)) * 0x297A2D39U;
  return x ^ (x >> 15);
}

/// Lists the samples.
__device__ inline void sample(const float* scores, std::int32_t length, int strata_bits, std::uint64_t* list) {
  const std::int32_t size = length >> strata_bits;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < 1 << strata_bits; i += kThreads) {
    const auto begin = static_cast<std::int32_t>(static_cast<std::int64_t>(i) * length >> strata_bits);
    const auto offset =
        static_cast<std::int32_t>(__umulhi(scrambled(static_cast<std::uint32_t>(i)), static_cast<std::uint32_t>(size)));
    const std::int32_t position = min(begin + offset, length - 2) & ~1;
    const float2 pair = *reinterpret_cast<const float2*>(scores + position);
    list[2 * i] = entry_of(ordered_key(pair.x), position);
    list[2 * i + 1] = entry_of(ordered_key(pair.y), position + 1);
  }
}

/// Scores of a thread: vector i is vector `first + i * kThreads + thread` of the row.
struct Batch {
  float4 vectors[kVectors];

  __device__ void load(const float* scores, std::int32_t first, std::int32_t end) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::int32_t at = first + (i * kThreads + static_cast<std::int32_t>(threadIdx.x)) * kVectorScores;
      vectors[i] = at < end ? *reinterpret_cast<const float4*>(scores + at) : float4{0.0F, 0.0F, 0.0F, 0.0F};
    }
  }
};

/// A list that grows; entries beyond its capacity are counted only.
struct List {
  std::uint64_t* entries;
  std::int32_t* count;
  std::int32_t capacity;
};

/// What reaches the list: scores that are at least the bound, or all.
struct Bound {
  float value;
  bool all;
};

/// Adds those of the batch's scores before `end` that reach the bound. The scores were loaded just now: their few are
/// loaded again, from the first-level cache, rather than picked from registers.
__device__ inline void add_batch(const Batch& batch, const float* scores, std::int32_t first, std::int32_t end,
                                 Bound bound, const List& list) {
  const std::int32_t own = first + static_cast<std::int32_t>(threadIdx.x) * kVectorScores;
  std::uint32_t reaching = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float4 v = batch.vectors[i];
    const float values[kVectorScores] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < kVectorScores; ++j) {
      const bool reaches = (values[j] >= bound.value || bound.all) && own + i * kThreads * kVectorScores + j < end;
      reaching |= reaches ? 1U << (i * kVectorScores + j) : 0U;
    }
  }
  const std::int32_t up_to = inclusive_warp_sum(__popc(reaching));
  std::int32_t at = 0;
  if (lane_index() == kWarp - 1 && up_to > 0) {
    at = atomicAdd(list.count, up_to);
  }
  at = __shfl_sync(kAllLanes, at, kWarp - 1) + up_to - __popc(reaching);
  for (; reaching != 0U && at < list.capacity; reaching &= reaching - 1U, ++at) {
    const int bit = __ffs(static_cast<int>(reaching)) - 1;
    const std::int32_t position = own + bit / kVectorScores * (kThreads * kVectorScores) + bit % kVectorScores;
    list.entries[at] = entry_of(ordered_key(scores[position]), position);
  }
}

/// Lists what a part has, of which `batch` holds the first scores.
__device__ inline void list_part(Batch& batch, const float* scores, Part part, Bound bound, const List& list) {
  for (std::int32_t first = part.begin; first < part.end; first += kBatch) {
    Batch next;
    next.load(scores, first + kBatch, part.end);
    add_batch(batch, scores, first, part.end, bound, list);
    batch = next;
  }
}

}  // namespace echo::top_k
