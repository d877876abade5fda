#pragma once
// Tokens that just missed the selection of a batch entry, and of them those whose rows are not resident: what a
// forecast looks at, by one thread block.
//
// A sample of the entry's scores says how far below the k-th one the tokens reach that are near enough; a pass over all
// scores lists those in shared memory; their host rows are looked up. Distances are those of ordered keys, which any
// scale of scores leaves fine enough. A context longer than kMostScanned is looked at in parts, another one in each
// step. Cost: 4 bytes of the L2 cache per token, some 8 us of one multiprocessor for 100,000.

#include "cache_manager/residency.cuh"
#include "kernels/number_formats.hpp"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr int kNearThreads = 1024;
inline constexpr int kNearWarps = kNearThreads / kWarp;
inline constexpr int kNearAtOnce = 16;                    ///< scores that a thread has under way
inline constexpr int kNearSampleAtOnce = 8;               ///< of the sample
inline constexpr std::int32_t kMostScanned = 128 * 1024;  ///< tokens
inline constexpr std::int32_t kMostNear = 2048;           ///< tokens that are looked at, at most
inline constexpr std::int32_t kNearSampled = 64;          ///< of them in the sample, or so
inline constexpr std::int32_t kMostNearStride = 16;
/// Keys below the k-th by their distance from it, finer where it is small: eight bins for each power of two.
inline constexpr std::int32_t kNearBins = 8 * kWarp;

__device__ inline std::int32_t near_bin(std::uint32_t below) {
  if (below < 8U) {
    return static_cast<std::int32_t>(below);
  }
  const int top = 31 - __clz(static_cast<int>(below));
  return 8 * (top - 2) + static_cast<std::int32_t>(below >> (top - 3) & 7U);
}

/// The first distance behind a bin.
__device__ inline std::uint32_t end_of_near_bin(std::int32_t bin) {
  const std::int32_t next = bin + 1;
  return next < 8 ? static_cast<std::uint32_t>(next) : static_cast<std::uint32_t>(8 + next % 8) << (next / 8 - 1);
}

/// A token that just missed the selection.
struct NearToken {
  std::int32_t place;  ///< its position, then its host row; kNone: not wanted
  std::uint32_t below;
};

struct NearShared {
  std::int32_t histogram[kNearBins];
  NearToken near[kMostNear];
  std::int32_t found;  ///< near tokens
  std::int32_t edge;   ///< last bin that counts
  std::int32_t rest;   ///< of its tokens, how many
};

/// The row of the block that speaks for the entry, and its scores.
struct Asked {
  std::int32_t row;
  std::int32_t length;
  const float* scores;
  float kth;
  std::uint32_t kth_key;

  __device__ Asked(const ForecastParams& p, std::int32_t entry, const KernelErrorView& errors) {
    const std::int32_t end = min((entry + 1) * p.step.query_rows, p.block.first + p.block.count);
    row = end - 1;
    length = min(static_cast<std::int64_t>(position_of(p.step, row, errors)) + 1, p.score_stride);
    scores = p.scores + static_cast<std::int64_t>(row - p.block.first) * p.score_stride;
    kth = p.kth_score[row];
    kth_key = ordered_key(kth);
  }
  /// Of a score that is a finite number at or below the k-th.
  __device__ bool near(float score, std::uint32_t& below) const {
    const std::uint32_t key = ordered_key(score);
    below = kth_key - key;
    return key <= kth_key && score > -3.0e38F;
  }
};

__device__ inline void clear_near_bins(NearShared& shared) {
  if (threadIdx.x < kNearBins) {
    shared.histogram[threadIdx.x] = 0;
  }
}

/// Finds the bin that the `wanted` best of the histogram reach into; all of them if there are fewer. By the first warp.
__device__ inline void find_near_bin(NearShared& shared, std::int32_t wanted) {
  constexpr int kEach = kNearBins / kWarp;
  const std::int32_t lane = lane_index();
  std::int32_t own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own += shared.histogram[lane * kEach + i];
  }
  const std::int32_t sum = inclusive_warp_sum(own);
  if (lane == kWarp - 1 && sum < wanted) {
    shared.edge = kNearBins;
    shared.rest = 0;
  }
  std::int32_t before = sum - own;
  if (before < wanted && wanted <= sum) {
    std::int32_t bin = lane * kEach;
    while (before + shared.histogram[bin] < wanted) {
      before += shared.histogram[bin++];
    }
    shared.edge = bin;
    shared.rest = wanted - before;
  }
}

/// Scores of `count` chunks of 32 tokens that are `stride` apart, from `first` on, that a warp has under way together.
template <int kCount>
struct Chunks {
  std::int32_t first;
  std::int32_t stride;
  float scores[kCount];

  __device__ std::int32_t position(int i) const { return (first + i * stride) * kWarp + lane_index(); }
  __device__ void load(const Asked& asked) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = position(i) < asked.length ? __ldcg(asked.scores + position(i)) : float_of(kFloatNan);
    }
  }
};

/// How far below the k-th key near tokens reach; 0 excludes all but its equals.
__device__ inline std::uint32_t find_reach(const Asked& asked, std::int32_t wanted, NearShared& shared) {
  const std::int32_t stride = min(max(wanted / kNearSampled, 1), kMostNearStride);
  const std::int32_t chunks = (asked.length - 1) / kWarp + 1;
  for (std::int32_t chunk = warp_index() * stride + stride / 2; chunk < chunks;
       chunk += kNearWarps * stride * kNearSampleAtOnce) {
    Chunks<kNearSampleAtOnce> sample{chunk, kNearWarps * stride, {}};
    sample.load(asked);
#pragma unroll
    for (const float score : sample.scores) {
      std::uint32_t below = 0;
      if (asked.near(score, below)) {
        atomicAdd(shared.histogram + near_bin(below), 1);
      }
    }
  }
  __syncthreads();
  if (warp_index() == 0) {
    find_near_bin(shared, wanted / stride);
  }
  __syncthreads();
  const std::uint32_t reach = shared.edge == kNearBins ? 0xFFFFFFFFU : end_of_near_bin(shared.edge) - 1U;
  __syncthreads();
  clear_near_bins(shared);
  return reach;
}

/// Lists near tokens of the part of the context that this step looks at.
__device__ inline void list_near(const Asked& asked, std::int32_t now, std::uint32_t reach, NearShared& shared) {
  const std::int32_t chunks = (asked.length - 1) / kWarp + 1;
  const std::int32_t parts = (asked.length - 1) / kMostScanned + 1;
  for (std::int32_t chunk = warp_index() * parts + now % parts; chunk < chunks;
       chunk += kNearWarps * parts * kNearAtOnce) {
    Chunks<kNearAtOnce> scan{chunk, kNearWarps * parts, {}};
    scan.load(asked);
#pragma unroll
    for (int i = 0; i < kNearAtOnce; ++i) {
      std::uint32_t below = 0;
      if (asked.near(scan.scores[i], below) && below <= reach) {
        const std::int32_t place = atomicAdd(&shared.found, 1);
        if (place < kMostNear) {
          shared.near[place] = {scan.position(i), below};
        }
      }
    }
  }
}

/// Near tokens become the host rows that are not resident, and those are counted.
__device__ inline void look_up_near(const ForecastParams& p, const Asked& asked, NearShared& shared,
                                    const KernelErrorView& errors) {
  constexpr int kEach = kMostNear / kNearThreads;
  const std::int32_t* table = block_table_of(p.step, asked.row);
  const std::int32_t* appended = p.step.positions + asked.row / p.step.query_rows * p.step.query_rows;
  const std::int32_t found = min(shared.found, kMostNear);
  std::int32_t positions[kEach];
  std::int32_t rows[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int32_t place = static_cast<std::int32_t>(threadIdx.x) + i * kNearThreads;
    positions[i] = place < found ? shared.near[place].place : kNone;
    for (std::int32_t row = 0; row < p.step.query_rows; ++row) {
      positions[i] = positions[i] == appended[row] ? kNone : positions[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int32_t block = positions[i] == kNone ? kNone : table[positions[i] / kTokensPerBlock];
    const bool right = block >= 0 && block < p.layer.host_rows / kTokensPerBlock;
    if (positions[i] != kNone && !right) {
      errors.raise(KernelError::bad_position);
    }
    rows[i] = right ? host_row(&block, positions[i] % kTokensPerBlock) : kNone;
  }
  bool wanted[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    wanted[i] = rows[i] != kNone && slot_word(p.layer, rows[i]).load(cuda::memory_order_relaxed) == kNone;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int32_t place = static_cast<std::int32_t>(threadIdx.x) + i * kNearThreads;
    if (place < found) {
      shared.near[place].place = wanted[i] ? rows[i] : kNone;
    }
    if (wanted[i]) {
      atomicAdd(shared.histogram + near_bin(shared.near[place].below), 1);
    }
  }
}

}  // namespace echo
