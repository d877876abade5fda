#pragma once
// Shared memory of score on Hopper: a ring of stages through which key blocks pass from the copy engine to the
// warpgroups that multiply them, and two buffers for the queries of a group of rows.

#include <cstdint>

#include "kernels/index_key_map.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/ptx/tensor_copy.cuh"
#include "kernels/score_queries.cuh"

namespace echo {

inline constexpr int kGroupWarps = 4;   ///< of a warpgroup
inline constexpr int kMultipliers = 3;  ///< warpgroups, which take the key blocks of a share in turns
inline constexpr int kMultiplierWarps = kMultipliers * kGroupWarps;
inline constexpr int kLoaderWarps = 3;
inline constexpr int kQueryLoaders = kLoaderWarps - 1;   ///< the last one writes new keys, and lists what is missing
inline constexpr int kFetcher = kMultiplierWarps;        ///< index of the warp that fetches keys; loaders follow
inline constexpr int kLister = kFetcher + kLoaderWarps;  ///< the last loader
inline constexpr int kScoreThreads = (kMultiplierWarps + 1 + kLoaderWarps) * kWarp;
inline constexpr int kBarriersMade = 1;          ///< hardware barrier: all but the multiplying warps may begin
inline constexpr int kStart = 2;                 ///< another: the first group's queries are there
inline constexpr int kKeysPut = 3;               ///< kMultipliers more: a warpgroup has put new keys into a block
inline constexpr int kBuffers = 2;               ///< of queries
inline constexpr int kMostColumns = 512;         ///< rows x heads of a group
inline constexpr int kSharedBytes = 227 * 1024;  ///< what a thread block can have
inline constexpr int kStageBytes = 9 * 1024;     ///< a block of keys, on a multiple of the swizzle's 1024 bytes
inline constexpr int kMostStages = 12;           ///< 9 to 21 take as long: about four are on their way
static_assert(kMostStages % kMultipliers == 0);
static_assert(kMapRowBytes == ptx::kSwizzleRow && kTokensPerBlock == 64 && kMapBlockBytes <= kStageBytes);

inline constexpr int kKeptKeys = 8;     ///< new keys that a thread block keeps, at most ...
inline constexpr int kKeptInStage = 4;  ///< ... behind the blocks of the first stages

/// Whether it does: products of several rows leave no registers for it.
template <int kHeads, int kColumns>
inline constexpr bool kKeepsKeys = kHeads == kColumns;

/// What is in a stage.
struct alignas(16) StageWork {
  std::int32_t group;      ///< of the thread block, counted from 0
  std::int32_t token;      ///< first of the key block; kNone: there is no more work
  std::int32_t new_first;  ///< kept keys that may be in it, and are not there yet
  std::int32_t new_count;
};

/// The key of a new token, as it will lie in the index cache.
struct alignas(16) KeptKey {
  std::uint32_t codes[kQueryDim / 4];
  float scale;
  std::int32_t position;  ///< kNone: there is no such token
};

static_assert(kMapBlockBytes + kKeptInStage * sizeof(KeptKey) + sizeof(ptx::Mbarrier) <= kStageBytes);
static_assert(kKeptKeys <= 2 * kMultipliers * kKeptInStage);  // there are that many stages at least

inline constexpr int kIdleBytes = (2 * kMultipliers - 1) * kStageBytes;  ///< of the stages behind the first

/// How large the parts of shared memory are.
struct ScoreSizes {
  std::int32_t heads;
  std::int32_t group_rows;
  std::int32_t sift_bytes;  ///< for sifting, a multiple of 16

  ECHO_HOST_DEVICE std::int32_t query_bytes() const { return group_rows * heads * kQueryDim; }
  ECHO_HOST_DEVICE std::int32_t weight_bytes() const {
    return group_rows * heads * static_cast<std::int32_t>(sizeof(float));
  }
  ECHO_HOST_DEVICE std::int32_t length_bytes() const { return (group_rows + 2 + 3) / 4 * 16; }
  /// What does not depend on the number of stages.
  ECHO_HOST_DEVICE std::int32_t fixed_bytes() const {
    return sift_bytes + static_cast<int>(sizeof(ptx::Mbarrier)) +
           kBuffers * (query_bytes() + weight_bytes() + length_bytes() + 2 * static_cast<int>(sizeof(ptx::Mbarrier)));
  }
  ECHO_HOST_DEVICE static std::int32_t stage_bytes() {
    return kStageBytes + static_cast<int>(sizeof(StageWork)) + 2 * static_cast<int>(sizeof(ptx::Mbarrier));
  }
  /// A multiple of the warpgroups, so that in each round a stage is the same one's. Copies may end in any order: a
  /// warpgroup that came to a stage before another had left its last phase would take that phase for its own.
  ECHO_HOST_DEVICE std::int32_t stages() const {
    const std::int32_t fit = (kSharedBytes - fixed_bytes()) / stage_bytes() / kMultipliers * kMultipliers;
    return fit < kMostStages ? fit : kMostStages;
  }
};

/// A place in the ring, and the parity of the phases that its barriers go through in this round.
struct RingPlace {
  std::int32_t stage;
  std::uint32_t parity = 0;

  /// `by` is at most the number of stages.
  __device__ void advance(std::int32_t by, std::int32_t stages) {
    stage += by;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1U;
    }
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
  std::byte* sift;               ///< [sift_bytes]
  StageWork* work;               ///< [stages]; score_plain has host blocks there, a word each
  ptx::Mbarrier* full;           ///< [stages] the keys and what to do are there
  ptx::Mbarrier* empty;          ///< [stages] a warpgroup has read them
  ptx::Mbarrier* queries_full;   ///< [kBuffers]
  ptx::Mbarrier* queries_empty;  ///< [kBuffers] all warpgroups have left the group
  ptx::Mbarrier* new_keys;       ///< those that this thread block had to write are there

  __device__ explicit ScoreStages(ScoreSizes sizes_) : sizes(sizes_), stages(sizes.stages()) {
    extern __shared__ __align__(1024) std::byte memory[];
    keys = memory;
    queries = keys + stages * kStageBytes;
    weights = queries + kBuffers * sizes.query_bytes();
    lengths = weights + kBuffers * sizes.weight_bytes();
    sift = lengths + kBuffers * sizes.length_bytes();
    work = reinterpret_cast<StageWork*>(sift + sizes.sift_bytes);
    full = reinterpret_cast<ptx::Mbarrier*>(work + stages);
    empty = full + stages;
    queries_full = empty + stages;
    queries_empty = queries_full + kBuffers;
    new_keys = queries_empty + kBuffers;
  }

  __device__ KeptKey& kept_key(std::int32_t index) const {
    std::byte* stage = keys + index / kKeptInStage * kStageBytes;
    return reinterpret_cast<KeptKey*>(stage + kMapBlockBytes)[index % kKeptInStage];
  }
  /// Memory that a thread block without key blocks may use as it likes, kIdleBytes: not the first stage, which has
  /// keys_kept. Nothing but barrier operations may touch a barrier's memory, also where nobody waits for it.
  __device__ std::byte* idle() const { return keys + kStageBytes; }
  /// The kept keys are there.
  __device__ ptx::Mbarrier& keys_kept() const {
    return *reinterpret_cast<ptx::Mbarrier*>(keys + kMapBlockBytes + kKeptInStage * sizeof(KeptKey));
  }
  __device__ GroupQueries queries_of(std::int32_t group) const {
    const std::int32_t buffer = group % kBuffers;
    auto* rows = reinterpret_cast<std::int32_t*>(lengths + buffer * sizes.length_bytes());
    return {queries + buffer * sizes.query_bytes(), reinterpret_cast<float*>(weights + buffer * sizes.weight_bytes()),
            rows + 2, rows};
  }

  /// Those of the stages where nobody writes new keys, by the multiplying warps, a stage's each.
  __device__ void make_stage_barriers(int warp) const {
    static_assert(kMostStages <= kMultiplierWarps);
    if (ptx::elect()) {
      if (warp < stages) {
        full[warp].init(1);
        empty[warp].init(kGroupWarps);
      }
      ptx::fence_mbarrier_init();
      ptx::fence_proxy_async();
    }
    __syncwarp();
  }
  /// Those of the queries there, which so many warps load; by a warp.
  __device__ void make_query_barriers(std::uint32_t loaders) const {
    if (ptx::elect()) {
#pragma unroll
      for (int buffer = 0; buffer < kBuffers; ++buffer) {
        queries_full[buffer].init(loaders);
        queries_empty[buffer].init(kMultiplierWarps);
      }
    }
    __syncwarp();
  }
  /// By `warps` warps together, each a few: a warp makes one after the other.
  __device__ void make_barriers(int warp, int warps) const {
    if (ptx::elect()) {
      for (int i = warp; i < stages; i += warps) {
        full[i].init(1);
        empty[i].init(kGroupWarps);
      }
      if (warp == 0) {
        new_keys->init(1);
        keys_kept().init(1);
      }
      if (warp >= warps - kBuffers) {
        const int buffer = warps - 1 - warp;
        queries_full[buffer].init(kQueryLoaders);
        queries_empty[buffer].init(kMultiplierWarps);
      }
      ptx::fence_mbarrier_init();
      ptx::fence_proxy_async();
    }
    __syncwarp();
  }
};

}  // namespace echo
