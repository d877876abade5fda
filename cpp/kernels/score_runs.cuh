#pragma once
// Runs: what a thread block scores, piece by piece. The fetching warp makes them, one ahead of what it fetches; all
// other warps read them from a ring in shared memory. First the thread block's part of the samples, then that of the
// rest, then what it draws from pools: from those of groups whose rest ends here, which it has to see empty, then from
// that of the group it was at, then it helps others. Queries stay in their buffer while the group does.

#include "kernels/score_groups.cuh"

namespace echo {

inline constexpr int kLoaderWarps = 3;
inline constexpr std::int32_t kRunPlaces = 32;

enum class RunKind : std::int32_t { all, sample, rest };

/// Key blocks of a group that are scored one after the other.
struct Run {
  RunKind kind;
  std::int32_t queries;  ///< counts the changes of the group; where its queries are follows from that
  GroupRows rows;
  std::int32_t first;  ///< in the numbering of this kind
  std::int32_t count;
  std::int32_t before;  ///< key blocks of the runs before

  __device__ std::int32_t end() const { return before + count; }
  /// Which block of the group the i-th of the run is.
  __device__ std::int32_t block(std::int32_t i) const {
    const std::int32_t number = first + i;
    return kind == RunKind::all      ? number
           : kind == RunKind::sample ? number * kSampleEvery
                                     : number + number / (kSampleEvery - 1) + 1;
  }
};

__device__ inline std::int32_t load_acquired(const std::int32_t& word) {
  std::int32_t value = 0;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];"
               : "=r"(value)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(&word)))
               : "memory");
  return value;
}
__device__ inline void store_released(std::int32_t& word, std::int32_t value) {
  asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(&word))),
               "r"(value)
               : "memory");
}

/// The ring, in shared memory. Loading warps must see every run before it is overwritten; others take what is there.
struct alignas(8) RunList {
  Run runs[kRunPlaces];
  std::int32_t put;                 ///< runs so far
  std::int32_t closed;              ///< whether that is all
  volatile std::int32_t share;      ///< key blocks of a thread block: on average, and when closed, of this one
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
    while (!__all_sync(kAllLanes, lane_index() >= kLoaderWarps || load_acquired(seen[lane_index()]) > place - kRunPlaces)) {
    }
    if (lane_index() == 0) {
      runs[place % kRunPlaces] = run;
      store_released(put, place + 1);
    }
    __syncwarp();
  }
  __device__ void close(std::int32_t total) {
    if (lane_index() == 0) {
      share = total;
      store_released(closed, 1);
    }
    __syncwarp();
  }

  // By the others.
  __device__ bool has(std::int32_t index) const { return load_acquired(put) > index; }
  __device__ bool ends_at(std::int32_t index) const { return load_acquired(closed) != 0 && load_acquired(put) == index; }
  __device__ const Run& operator[](std::int32_t index) const { return runs[index % kRunPlaces]; }
  /// Reads a run that may be overwritten meanwhile; false if it was.
  __device__ bool copy(std::int32_t index, Run& run) const {
    run = runs[index % kRunPlaces];
    __syncwarp();
    return load_acquired(put) - index < kRunPlaces;
  }
};

/// Makes the runs of a thread block. By the fetching warp.
class RunMaker {
 public:
  __device__ RunMaker(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors, bool sifts)
      : walk_(p, groups, errors, sifts), tickets_(groups.tickets) {
    stage_ = walk_.deal().samples ? Stage::samples : Stage::rest;
  }

  __device__ std::int32_t share() const { return walk_.share(); }
  /// Key blocks of the runs so far.
  __device__ std::int32_t made() const { return made_; }

  /// The next run; false if there is none.
  __device__ bool make(Run& run) {
    if (!find()) {
      return false;
    }
    const bool sample = stage_ == Stage::samples;
    run = {.kind = sample ? RunKind::sample : walk_.deal().samples ? RunKind::rest : RunKind::all,
           .queries = queries_,
           .rows = walk_.rows(group_),
           .first = first_,
           .count = count_,
           .before = made_};
    made_ += count_;
    return true;
  }

 private:
  static constexpr std::int32_t kMostTries = 6;        ///< at others' pools, one after the other in vain
  static constexpr std::int32_t kTicketsOfShare = 40;  ///< so many tickets are a thread block's whole share

  enum class Stage : std::int32_t { samples, rest, pools, done };

  __device__ bool find();
  __device__ void enter(std::int32_t group) {
    queries_ += group == group_ ? 0 : 1;
    group_ = group;
  }
  /// The next group to whose pool to go, kNone if that is enough.
  __device__ std::int32_t next_pool() {
    const std::int32_t ended = ended_[0];
    if (ended != kNone) {
      ended_[0] = ended_[1];
      ended_[1] = kNone;
      last_ = ended;  // the groups behind it come next; the one that the rest ended with is among the first of them
      return ended;
    }
    if (tries_ == min(kMostTries, walk_.groups())) {
      return kNone;
    }
    const std::int32_t group = last_;
    last_ = group + 1 == walk_.groups() ? 0 : group + 1;
    ++tries_;
    return group;
  }
  __device__ void draw() {
    if (lane_index() == 0) {
      ticket_ = atomicAdd(tickets_ + pool_group_, 1);
    }
  }
  /// The last thread block that stops drawing leaves the tickets as they were.
  __device__ void leave() {
    bool last = false;
    if (lane_index() == 0) {
      last = atomicInc(reinterpret_cast<unsigned*>(tickets_ + walk_.groups()), gridDim.x - 1U) == gridDim.x - 1U;
    }
    if (__any_sync(kAllLanes, last)) {
#pragma unroll 1
      for (std::int32_t group = lane_index(); group < walk_.groups(); group += kWarp) {
        tickets_[group] = 0;
      }
    }
  }

  GroupWalk walk_;
  std::int32_t* tickets_;
  Stage stage_;
  bool begun_ = false;          ///< the stage's walk, or the current pool
  std::int32_t group_ = kNone;  ///< of the run
  std::int32_t queries_ = -1;
  std::int32_t first_ = 0;
  std::int32_t count_ = 0;
  std::int32_t made_ = 0;
  std::int32_t ended_[2] = {kNone, kNone};  ///< groups with a pool whose rest ends here, which has to see them empty
  std::int32_t last_ = 0;                   ///< group to try next
  std::int32_t tries_ = 0;
  std::int32_t pool_group_ = kNone;
  std::int32_t pool_first_ = 0;
  std::int32_t pool_end_ = 0;
  std::int32_t ticket_ = 0;  ///< of lane 0; drawn one ahead
};

__device__ __forceinline__ bool RunMaker::find() {
  const Deal& deal = walk_.deal();
#pragma unroll 1
  while (stage_ == Stage::samples || stage_ == Stage::rest) {
    const bool samples = stage_ == Stage::samples;
    if (begun_ ? walk_.next() : walk_.begin(samples)) {
      begun_ = true;
      enter(walk_.group());
      first_ = walk_.first();
      count_ = walk_.count();
      if (!samples && deal.shortest != 0) {
        const std::int32_t blocks = walk_.blocks_of_group(group_);
        if (deal.pool_of(blocks) > 0 && first_ + count_ == deal.rest_of(blocks)) {
          ended_[1] = ended_[0];
          ended_[0] = group_;
        }
      }
      return true;
    }
    begun_ = false;
    last_ = max(group_, 0);
    stage_ = samples ? Stage::rest : deal.shortest != 0 ? Stage::pools : Stage::done;
  }
  const std::int32_t unit = min(max(walk_.share() / kTicketsOfShare, 2), 16);
#pragma unroll 1
  while (stage_ == Stage::pools) {
    if (!begun_) {
      pool_group_ = next_pool();
      if (pool_group_ == kNone) {
        leave();
        stage_ = Stage::done;
        break;
      }
      const std::int32_t blocks = walk_.blocks_of_group(pool_group_);
      pool_first_ = deal.rest_of(blocks);
      pool_end_ = pool_first_ + deal.pool_of(blocks);
      if (pool_first_ == pool_end_) {
        continue;
      }
      begun_ = true;
      draw();
    }
    first_ = pool_first_ + __shfl_sync(kAllLanes, ticket_, 0) * unit;
    count_ = min(unit, pool_end_ - first_);
    if (count_ > 0) {
      enter(pool_group_);
      tries_ = 0;
      draw();
      return true;
    }
    begun_ = false;
  }
  return false;
}

}  // namespace echo
