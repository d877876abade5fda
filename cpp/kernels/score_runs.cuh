#pragma once
// Runs: what a thread block scores, piece by piece. Without sifting, its part of all key blocks; with it, its part of
// the samples, then its part of the rest: after a fraction of the time the grid has scored an even sample of all rows,
// without waiting for anybody. Queries stay in their buffer while the group does. The warps that sift read runs from a
// ring in shared memory, into which the fetching warp puts them one ahead of what it fetches; all others make them.

#include "kernels/score_groups.cuh"
#include "kernels/score_progress.cuh"

namespace echo {

inline constexpr std::int32_t kRunPlaces = 32;

enum class RunKind : std::int32_t { all, sample, rest };

/// Key blocks of a group that are scored one after the other.
struct Run {
  RunKind kind;
  std::int32_t queries;  ///< counts the changes of the group; where its queries are follows from that
  GroupRows rows;
  std::int32_t sampled;  ///< first block of the group's sample
  std::int32_t blocks;   ///< of the group
  std::int32_t first;    ///< in the numbering of this kind
  std::int32_t count;
  std::int32_t before;  ///< key blocks of the runs before

  __device__ std::int32_t end() const { return before + count; }
  /// Which block of the group the i-th of the run is.
  __device__ std::int32_t block(std::int32_t i) const {
    const std::int32_t number = first + i;
    return kind == RunKind::all      ? number
           : kind == RunKind::sample ? number * kSampleEvery + sampled
                                     : number + (number + kSampleEvery - 1 - sampled) / (kSampleEvery - 1);
  }
  /// Whether a block of the group is one of the run.
  __device__ bool has(std::int32_t block) const {
    const bool in_sample = block % kSampleEvery == sampled;
    const std::int32_t samples = (block + kSampleEvery - 1 - sampled) / kSampleEvery;  // below the block
    const std::int32_t number = kind == RunKind::all ? block : kind == RunKind::sample ? samples : block - samples;
    return (kind == RunKind::all || in_sample == (kind == RunKind::sample)) && number >= first &&
           number < first + count;
  }
  /// Whether a block may hold tokens that the pass appends: one of each of the rows, the last ones of the session.
  __device__ bool is_new(std::int32_t block) const { return block >= blocks - (rows.last - rows.first > 1 ? 2 : 1); }
};

/// What a lane sees of a word of shared memory that another warp writes, and what was stored before it.
__device__ inline std::int32_t load_acquired(const std::int32_t& word) {
  const std::int32_t value = ptx::load_shared_volatile(ptx::shared_address(&word));
  ptx::block_fence();
  return value;
}
/// The same for all lanes of a warp, that they agree.
__device__ inline std::int32_t warp_load_acquired(const std::int32_t& word) {
  const std::int32_t value = __shfl_sync(kAllLanes, load_acquired(word), 0);
  __syncwarp();
  return value;
}
__device__ inline void store_released(std::int32_t& word, std::int32_t value) {
  ptx::store_shared_release(ptx::shared_address(&word), value);
}

/// The ring, in shared memory. Loading warps must see every run before it is overwritten; others take what is there.
struct alignas(8) RunList {
  Run runs[kRunPlaces];
  std::int32_t put;                 ///< runs so far
  std::int32_t closed;              ///< whether that is all
  std::int32_t share;               ///< key blocks of a thread block: on average, and when closed, of this one
  std::int32_t seen[kLoaderWarps];  ///< runs, by each loader

  // By the fetching warp.
  __device__ void open(std::int32_t average) {
    if (lane_index() == 0) {
      put = closed = 0;
      share = average;
    }
    if (lane_index() < kLoaderWarps) {
      seen[lane_index()] = 0;
    }
    __syncwarp();
  }
  __device__ void publish(const Run& run) {
    const std::int32_t place = put;
    while (!__all_sync(kAllLanes,
                       lane_index() >= kLoaderWarps || load_acquired(seen[lane_index()]) > place - kRunPlaces)) {
    }
    if (lane_index() == 0) {
      runs[place % kRunPlaces] = run;
      store_released(put, place + 1);
    }
    __syncwarp();
  }
  __device__ void close(std::int32_t total) {
    if (lane_index() == 0) {
      store_released(share, total);
      store_released(closed, 1);
    }
    __syncwarp();
  }

  // By the others.
  __device__ bool has(std::int32_t index) const { return warp_load_acquired(put) > index; }
  __device__ bool ends_at(std::int32_t index) const {
    return warp_load_acquired(closed) != 0 && warp_load_acquired(put) == index;
  }
  __device__ const Run& operator[](std::int32_t index) const { return runs[index % kRunPlaces]; }
  /// Reads a run that may be overwritten meanwhile; false if it was.
  __device__ bool copy(std::int32_t index, Run& run) const {
    run = runs[index % kRunPlaces];
    __syncwarp();
    return warp_load_acquired(put) - index < kRunPlaces;
  }
};

/// Makes the runs of a thread block.
template <bool kSift>
class RunMaker {
 public:
  __device__ RunMaker(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors)
      : walk_(p, groups, errors) {
    if (kSift) {
      kind_ = walk_.share() < p.sift.least_share ? RunKind::all : RunKind::sample;
    }
  }

  /// Key blocks of a thread block, on average, and of the runs so far.
  __device__ std::int32_t share() const { return walk_.share(); }
  __device__ std::int32_t made() const { return run_.end(); }

  /// Goes to the first run, then to the next one; false if there is none.
  __device__ bool begin() {
    bool there = walk_.begin(list_of(kind_));
    if (kSift && !there && kind_ == RunKind::sample) {
      kind_ = RunKind::rest;
      there = walk_.begin(KeyList::rest);
    }
    return enter(there);
  }
  __device__ bool next() {
    bool there = walk_.next();
    if (kSift && !there && kind_ == RunKind::sample) {
      kind_ = RunKind::rest;
      there = walk_.begin(KeyList::rest);
    }
    return enter(there);
  }

  __device__ const Run& run() const { return run_; }

 private:
  __device__ static KeyList list_of(RunKind kind) {
    return kind == RunKind::all ? KeyList::all : kind == RunKind::sample ? KeyList::samples : KeyList::rest;
  }
  __device__ bool enter(bool there) {
    if (there) {
      const GroupRows rows = walk_.rows();
      const std::int32_t before = run_.end();
      const std::int32_t queries = run_.queries + (rows.first == run_.rows.first ? 0 : 1);
      run_ = {.kind = kind_,
              .queries = queries,
              .rows = rows,
              .sampled = kSift ? walk_.sampled() : 0,
              .blocks = walk_.blocks(),
              .first = walk_.first(),
              .count = walk_.count(),
              .before = before};
    }
    return there;
  }

  GroupWalk walk_;
  RunKind kind_ = RunKind::all;
  Run run_{.kind = RunKind::all,
           .queries = -1,
           .rows = {kNone, kNone, kNone},
           .sampled = 0,
           .blocks = 0,
           .first = 0,
           .count = 0,
           .before = 0};
};

}  // namespace echo
