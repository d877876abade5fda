#pragma once
// Which tokens of a row may be selected: a bound from a sample of the scores, and the list of all that reach it.
//
// The sample is four neighbours at a hashed place of each of as many equal parts of the row as there are threads (no
// period of the scores meets it); parts are dealt out to warps in turns, so that a run of high scores is in all of
// them. The bound is the median of the warps' scores of one rank, at which 1.75 k tokens of the row are expected to
// reach it: as found by simulation, 1.2 k to 3.4 k then do, in rows of independent, smooth and clustered scores. A
// guess that decides nothing but speed. It is a score of the row: where many tie, it is likely to be theirs.

#include "kernels/ptx/cluster.cuh"
#include "kernels/select_list.cuh"

namespace echo::top_k {

inline constexpr std::int32_t kVectorScores = 4;
inline constexpr int kVectors = 4;  ///< that a thread has in flight
inline constexpr std::int32_t kVectorStep = kListThreads * kVectorScores;
inline constexpr std::int32_t kBatch = kVectors * kVectorStep;

/// How a row is sampled.
struct Sampling {
  std::int32_t rounds;  ///< vectors of a thread
  bool whole_vectors;   ///< or only the first score of each
  std::int32_t rank;    ///< of a warp's samples, from 1
};

__device__ inline Sampling sampling_of(std::int32_t length, std::int32_t k) {
  constexpr std::int32_t kLongRow = 1 << 18;
  constexpr float kExcess = 1.75F;
  constexpr float kHighRank = 12.0F;
  Sampling sampling{length < kLongRow ? 1 : 8, true, 0};
  const auto vectors = static_cast<float>(sampling.rounds * kWarp);
  float expected = vectors * kVectorScores * kExcess * static_cast<float>(k) / static_cast<float>(length);
  if (expected > kHighRank) {
    sampling.whole_vectors = false;
    expected /= kVectorScores;
  }
  const auto rank = static_cast<std::int32_t>(ceilf(expected + 0.3F));
  sampling.rank = rank == kVectorScores ? rank + 1 : rank;  // a single vector of high neighbours does not decide
  return sampling;
}

__device__ inline std::uint32_t scrambled(std::uint32_t x) {
  x = (x ^ (x >> 15)) * 0x2C1B3C6DU;
  x = (x ^ (x >> 12)) * 0x297A2D39U;
  return x ^ (x >> 15);
}

/// The largest four keys of a thread's samples, in order.
struct Best {
  std::uint32_t keys[kVectorScores];

  __device__ void insert(std::uint32_t key) {
#pragma unroll
    for (std::uint32_t& place : keys) {
      const std::uint32_t larger = max(place, key);
      key = min(place, key);
      place = larger;
    }
  }
  __device__ void drop_first() {
#pragma unroll
    for (int i = 0; i + 1 < kVectorScores; ++i) {
      keys[i] = keys[i + 1];
    }
    keys[kVectorScores - 1] = 0U;
  }
};

__device__ inline Best sample(const float* scores, std::int32_t length, const Sampling& sampling) {
  Best best{};
  const std::int32_t parts = sampling.rounds * kListThreads;
  const std::int32_t size = length / parts;
#pragma unroll 1
  for (std::int32_t round = 0; round < sampling.rounds; ++round) {
    const std::int32_t part = round * kListThreads + lane_index() * kListWarps + warp_index();
    // Parts of `size` would leave the row's end out.
    const auto begin =
        static_cast<std::int32_t>(static_cast<float>(part) / static_cast<float>(parts) * static_cast<float>(length));
    const auto offset = static_cast<std::int32_t>(
        __umulhi(scrambled(static_cast<std::uint32_t>(part)), static_cast<std::uint32_t>(size)));
    const std::int32_t position = min(begin + offset, length - kVectorScores) / kVectorScores * kVectorScores;
    const float4 v = *reinterpret_cast<const float4*>(scores + position);
    best.insert(ordered_key(v.x));
    if (sampling.whole_vectors) {
      best.insert(ordered_key(v.y));
      best.insert(ordered_key(v.z));
      best.insert(ordered_key(v.w));
    }
  }
  return best;
}

/// The bound; `by_warp` is shared memory for a key of each warp.
__device__ inline std::uint32_t bound_of(Best best, std::int32_t rank, std::uint32_t* by_warp) {
  std::uint32_t key = 0;
  for (;;) {
    key = __reduce_max_sync(kAllLanes, best.keys[0]);
    const bool first = best.keys[0] == key;
    rank -= __popc(__ballot_sync(kAllLanes, first));
    if (rank <= 0 || key == 0U) {
      break;
    }
    if (first) {
      best.drop_first();
    }
  }
  if (lane_index() == 0) {
    by_warp[warp_index()] = key;
  }
  __syncthreads();
  const int lane = lane_index() % kListWarps;
  const std::uint32_t own = by_warp[lane];
  int larger = 0;
#pragma unroll
  for (int warp = 0; warp < kListWarps; ++warp) {
    const std::uint32_t other = by_warp[warp];
    larger += other > own || (other == own && warp < lane) ? 1 : 0;
  }
  const unsigned median = __ballot_sync(kAllLanes, larger == kListWarps / 2);
  return __shfl_sync(kAllLanes, own, __ffs(static_cast<int>(median)) - 1);
}

/// The list that a cluster fills: in the shared memory of its first block, at the same address in all.
struct ClusterList {
  std::uint64_t* entries;
  std::int32_t* count;
  ptx::Mbarrier* filled;  ///< a phase for all warps of the cluster, and for the bytes that others than its own store
  std::int32_t capacity;  ///< entries beyond it are counted only
  bool own;               ///< this is the first block

  /// Room for `room` entries of this lane's warp, of which lane 31 has the sum.
  __device__ std::int32_t reserve(std::int32_t room) const {
    return own ? atomicAdd(count, room) : ptx::add_to_block(count, 0, room);
  }
  __device__ void store(std::int32_t at, std::uint64_t entry) const {
    if (own) {
      entries[at] = entry;
    } else {
      ptx::store_async(entries + at, 0, entry, *filled);
    }
  }
  /// Once for each warp, which has stored so many entries in all lanes together.
  __device__ void finish(std::int32_t stored) const {
    __syncwarp();
    if (lane_index() == 0) {
      if (own) {
        filled->arrive();
      } else {
        filled->arrive_remote_expecting(0, static_cast<std::uint32_t>(stored) * sizeof(std::uint64_t));
      }
    }
  }
};

/// Scores of a thread: vector i is vector i * kListThreads + thread from the first score on. NaN behind the end.
struct Batch {
  float4 vectors[kVectors];

  __device__ void load(const float* scores, std::int32_t first, std::int32_t end) {
    const float nan = float_of(kFloatNan);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::int32_t at = first + i * kVectorStep + static_cast<std::int32_t>(threadIdx.x) * kVectorScores;
      float4& v = vectors[i];
      v = at < end ? *reinterpret_cast<const float4*>(scores + at) : float4{nan, nan, nan, nan};
      if (at < end && at + kVectorScores > end) {
        v = {v.x, at + 1 < end ? v.y : nan, at + 2 < end ? v.z : nan, nan};
      }
    }
  }

  /// A bit for each score that is at least the bound.
  __device__ std::uint32_t reaching(float bound) const {
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      bits |= vectors[i].x >= bound ? 1U << (kVectorScores * i) : 0U;
      bits |= vectors[i].y >= bound ? 2U << (kVectorScores * i) : 0U;
      bits |= vectors[i].z >= bound ? 4U << (kVectorScores * i) : 0U;
      bits |= vectors[i].w >= bound ? 8U << (kVectorScores * i) : 0U;
    }
    return bits;
  }
};
static_assert(kVectors * kVectorScores <= 32);

/// A thread's scores that reach the bound, taken a few at a time. They were loaded just now: these are loaded again,
/// from the first-level cache, rather than picked from registers.
struct Reaching {
  static constexpr int kTogether = 4;

  std::uint32_t bits;  ///< those not yet taken
  std::int32_t first;  ///< position of the batch
  std::int32_t positions[kTogether];
  float scores[kTogether];
  int taken;

  __device__ void take(const float* row) {
    taken = min(__popc(bits), kTogether);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int bit = __ffs(static_cast<int>(bits)) - 1;
      positions[i] =
          first + (bit >> 2) * kVectorStep + static_cast<std::int32_t>(threadIdx.x) * kVectorScores + (bit & 3);
      scores[i] = bits != 0U ? row[positions[i]] : 0.0F;
      bits &= bits - 1U;
    }
  }
};
static_assert(kVectorScores == 4);

/// Lists what of a part is at least the bound; `batch` holds its first scores.
__device__ inline void list_part(Batch& batch, const float* scores, Part part, float bound, const ClusterList& list) {
  std::int32_t stored = 0;
  for (std::int32_t first = part.begin; first < part.end; first += kBatch) {
    Reaching reaching{.bits = batch.reaching(bound), .first = first};
    const std::int32_t own = __popc(reaching.bits);
    const std::int32_t up_to = inclusive_warp_sum(own);
    std::int32_t at = 0;
    if (lane_index() == kWarp - 1 && up_to > 0) {
      at = list.reserve(up_to);
    }
    reaching.take(scores);
    if (first + kBatch < part.end) {
      batch.load(scores, first + kBatch, part.end);
    }
    at = __shfl_sync(kAllLanes, at, kWarp - 1) + up_to - own;
    stored += max(0, min(own, list.capacity - at));
    while (reaching.taken > 0) {
#pragma unroll
      for (int i = 0; i < Reaching::kTogether; ++i) {
        if (i < reaching.taken && at + i < list.capacity) {
          list.store(at + i, entry_of(ordered_key(reaching.scores[i]), reaching.positions[i]));
        }
      }
      at += reaching.taken;
      reaching.take(scores);
    }
  }
  list.finish(warp_sum(stored));
}

/// Lists a part of a row that fits into the list as a whole.
__device__ inline void list_all(const float* scores, Part part, const ClusterList& list) {
  std::int32_t stored = 0;
  for (std::int32_t i = part.begin + static_cast<std::int32_t>(threadIdx.x); i < part.end; i += kListThreads) {
    list.store(i, entry_of(ordered_key(scores[i]), i));
    ++stored;
  }
  list.finish(warp_sum(stored));
}

}  // namespace echo::top_k
