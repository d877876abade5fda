#pragma once
// What the sifting warps of score work with: scores of a row, many at once, and shared memory.

#include "kernels/score_progress.cuh"
#include "kernels/score_runs.cuh"

namespace echo {

inline constexpr int kSifters = 2;                      ///< warps
inline constexpr int kChunkBlocks = 8;                  ///< key blocks that a sifter reads at once
inline constexpr int kChunkLoads = 4;                   ///< of a lane, four scores each
inline constexpr int kLoadLanes = kTokensPerBlock / 4;  ///< that load a block
inline constexpr std::int32_t kRingPlaces = 256;
inline constexpr std::int32_t kCollected = 640;  ///< candidates, more than a chunk can have
static_assert(kChunkBlocks * kLoadLanes == kChunkLoads * kWarp && kChunkBlocks * kTokensPerBlock < kCollected);
static_assert(kSifters < kLoaderWarps);

/// A token that is worth fetching.
struct alignas(8) WantedToken {
  std::int32_t entry;  ///< of the batch
  std::int32_t position;
};

/// From a sifter to the prefetching warp. What does not fit is dropped.
struct PrefetchRing {
  WantedToken tokens[kRingPlaces];
  std::int32_t put;    ///< so far; by the sifter
  std::int32_t taken;  ///< by the prefetcher
};

struct SiftShared {
  ScoreProgress progress;
  PrefetchRing rings[kSifters];
  std::int32_t bins[kSifters][kSiftBins];
  ScoredToken collected[kSifters][kCollected];

  /// Before anybody looks; by one warp.
  __device__ void clear() {
    if (lane_index() < kMultiplierWarps) {
      progress.finished[lane_index()] = 0;
    }
    if (lane_index() < kSifters) {
      rings[lane_index()].put = rings[lane_index()].taken = 0;
    }
  }
};

/// Scores of a row, of up to kChunkBlocks blocks of a run. Lane l has four of each second block.
struct ScoreChunk {
  float4 fours[kChunkLoads];
  std::int32_t tokens[kChunkLoads];  ///< first of the four
  unsigned there = 0;                ///< a bit for each score

  __device__ void load(const Run& run, std::int32_t first, const float* scores, std::int32_t length) {
    const std::int32_t number = first + lane_index() % kChunkBlocks;
    const std::int32_t block = number < run.count ? run.block(number) : 1 << 24;
#pragma unroll
    for (int i = 0; i < kChunkLoads; ++i) {
      const std::int32_t own = __shfl_sync(kAllLanes, block, 2 * i + lane_index() / kLoadLanes);
      tokens[i] = own * kTokensPerBlock + lane_index() % kLoadLanes * 4;
      const std::int32_t count = min(max(length - tokens[i], 0), 4);
      there |= ((1U << count) - 1U) << (4 * i);
      fours[i] = count > 0 ? *reinterpret_cast<const float4*>(scores + tokens[i]) : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    }
  }
  /// Calls work(i, score) for all scores, those that are not there too.
  template <typename Work>
  __device__ void for_each(const Work& work) const {
#pragma unroll
    for (int i = 0; i < kChunkLoads; ++i) {
      work(4 * i, fours[i].x);
      work(4 * i + 1, fours[i].y);
      work(4 * i + 2, fours[i].z);
      work(4 * i + 3, fours[i].w);
    }
  }
  __device__ unsigned at_least(float bound) const {
    unsigned hits = 0;
    for_each([&](int i, float score) { hits |= score >= bound ? 1U << i : 0U; });
    return hits & there;
  }
};

}  // namespace echo
