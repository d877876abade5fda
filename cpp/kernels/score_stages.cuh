#pragma once
// Shared memory of score on Hopper: a ring of stages through which key blocks pass from the copy engine to the
// warpgroups that multiply them, and two buffers for the queries of a group of rows.

#include <cstdint>

#include "kernels/async_copy.cuh"
#include "kernels/index_key_map.hpp"
#include "kernels/score_queries.cuh"

namespace echo {

inline constexpr int kGroupWarps = 4;   ///< of a warpgroup
inline constexpr int kMultipliers = 3;  ///< warpgroups
inline constexpr int kMultiplierWarps = kMultipliers * kGroupWarps;
inline constexpr int kLoaderWarps = 3;
inline constexpr int kFetcher = kMultiplierWarps;  ///< index of the warp that fetches keys; loaders follow
inline constexpr int kScoreThreads = (kMultiplierWarps + 1 + kLoaderWarps) * kWarp;
inline constexpr int kBarriersMade = 1;          ///< hardware barrier: the fetching warp may begin
inline constexpr int kStart = 2;                 ///< and one more: the first queries are there
inline constexpr int kBuffers = 2;               ///< of queries
inline constexpr int kMostColumns = 512;         ///< rows x heads of a group
inline constexpr int kSharedBytes = 227 * 1024;  ///< what a thread block can have
inline constexpr int kStageBytes = 9 * 1024;     ///< a block of keys, on a multiple of the swizzle's 1024 bytes
inline constexpr int kMostStages = 24;
static_assert(kMapRowBytes == kMmaRowBytes && kTokensPerBlock == kMmaRows && kMapBlockBytes <= kStageBytes);

/// What is in a stage.
struct alignas(16) StageWork {
  std::int32_t group;  ///< of the thread block, counted from 0
  std::int32_t row;    ///< first row of the group, counted from the first of the row block
  std::int32_t rows;   ///< of the group; 0 if there is no more work
  std::int32_t token;  ///< first of the key block
};

/// How large the parts of shared memory are.
struct ScoreSizes {
  std::int32_t heads;
  std::int32_t group_rows;

  ECHO_HOST_DEVICE std::int32_t query_bytes() const { return group_rows * heads * kQueryDim; }
  ECHO_HOST_DEVICE std::int32_t weight_bytes() const {
    return group_rows * heads * static_cast<std::int32_t>(sizeof(float));
  }
  ECHO_HOST_DEVICE std::int32_t length_bytes() const { return (group_rows + 3) / 4 * 16; }
  /// What does not depend on the number of stages.
  ECHO_HOST_DEVICE std::int32_t fixed_bytes() const {
    return kBuffers * (query_bytes() + weight_bytes() + length_bytes() + 2 * static_cast<int>(sizeof(SharedBarrier)));
  }
  ECHO_HOST_DEVICE static std::int32_t stage_bytes() {
    return kStageBytes + static_cast<int>(sizeof(StageWork)) + 2 * static_cast<int>(sizeof(SharedBarrier));
  }
  ECHO_HOST_DEVICE std::int32_t stages() const {
    const std::int32_t fit = (kSharedBytes - fixed_bytes()) / stage_bytes();
    return fit < kMostStages ? fit : kMostStages;
  }
};

/// Shared memory, and how the warps take turns in it.
struct ScoreStages {
  ScoreSizes sizes;
  std::int32_t stages;
  std::byte* keys;               ///< [stages, kStageBytes]
  std::byte* queries;            ///< [kBuffers, query_bytes]
  std::byte* weights;            ///< [kBuffers, weight_bytes]
  std::byte* lengths;            ///< [kBuffers, length_bytes]
  StageWork* work;               ///< [stages]
  SharedBarrier* full;           ///< [stages] the keys and what to do are there
  SharedBarrier* empty;          ///< [stages] a warpgroup has read them
  SharedBarrier* queries_full;   ///< [kBuffers]
  SharedBarrier* queries_empty;  ///< [kBuffers] all warpgroups have left the group

  __device__ explicit ScoreStages(ScoreSizes sizes_) : sizes(sizes_), stages(sizes.stages()) {
    extern __shared__ __align__(1024) std::byte memory[];
    keys = memory;
    queries = keys + stages * kStageBytes;
    weights = queries + kBuffers * sizes.query_bytes();
    lengths = weights + kBuffers * sizes.weight_bytes();
    work = reinterpret_cast<StageWork*>(lengths + kBuffers * sizes.length_bytes());
    full = reinterpret_cast<SharedBarrier*>(work + stages);
    empty = full + stages;
    queries_full = empty + stages;
    queries_empty = queries_full + kBuffers;
  }

  __device__ GroupQueries queries_of(std::int32_t group) const {
    const std::int32_t buffer = group % kBuffers;
    return {queries + buffer * sizes.query_bytes(), reinterpret_cast<float*>(weights + buffer * sizes.weight_bytes()),
            reinterpret_cast<std::int32_t*>(lengths + buffer * sizes.length_bytes())};
  }

  /// By one warp.
  __device__ void make_barriers() const {
    static_assert(kMostStages <= kWarp && kBuffers <= kWarp);
    if (lane_index() < stages) {
      make_barrier(full[lane_index()], 1);
      make_barrier(empty[lane_index()], kGroupWarps);
    }
    if (lane_index() < kBuffers) {
      make_barrier(queries_full[lane_index()], kLoaderWarps * kWarp);
      make_barrier(queries_empty[lane_index()], kMultiplierWarps);
    }
    publish_barriers();
    __syncwarp();
  }
};

}  // namespace echo
