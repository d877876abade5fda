#pragma once
// How the work of a score call is cut up: rows of a block that share a block table form groups, and the key blocks of
// all groups make long lists, of which each thread block takes an equal part. Lengths are known on the device only, so
// one warp of each thread block finds its part for itself, from the positions of the rows.
//
// There are three lists. With sifting, every kSampleEvery-th block goes first, so that after a fraction of the time the
// grid has scored an even sample of all rows, without waiting for anybody. Then the rest, but for the pools: the last
// blocks of long groups are left to whoever is done with the rest, a few at a time, by tickets. Multiprocessors are not
// equally far from memory: with equal parts some end 15 % before others. (score_runs.cuh)

#include <cstdint>

#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {

/// The groups of a row block, in order of their rows. Each batch entry has as many; the last ones may be empty.
struct RowGroups {
  std::int32_t first_entry;
  std::int32_t per_entry;
  std::int32_t rows;  ///< of a group, at most
  std::int32_t count;
  std::uint32_t share;    ///< of a thread block, in units of 2^-32, rounded up
  std::int32_t* tickets;  ///< [count + 1] drawn from each group's pool, and thread blocks that are done; 0 between calls
};

/// Rows [first, last) of the pass, all of one batch entry.
struct GroupRows {
  std::int32_t entry;
  std::int32_t first;
  std::int32_t last;
};

__device__ inline GroupRows rows_of(const RowGroups& groups, const ScoreParams& p, std::int32_t group) {
  std::int32_t entry = group;
  std::int32_t before = 0;
  if (groups.per_entry > 1) {  // a division takes longer than it looks
    entry = group / groups.per_entry;
    before = (group - entry * groups.per_entry) * groups.rows;
  }
  entry += groups.first_entry;
  const std::int32_t first = max(entry * p.step.query_rows, p.block.first) + before;
  const std::int32_t end = min((entry + 1) * p.step.query_rows, p.block.first + p.block.count);
  return {entry, first, min(first + groups.rows, end)};
}

/// Scores that a row gets: none if it is padding or out of bounds.
__device__ inline std::int32_t length_of(const ScoreParams& p, std::int32_t row, const KernelErrorView& errors) {
  const std::int32_t length = position_of(p.step, row, errors) + 1;
  if (length > p.score_stride) {
    errors.raise(KernelError::bad_position);
    return 0;
  }
  return length;
}

/// Key blocks of a group: as many as its furthest row needs.
__device__ inline std::int32_t blocks_of(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors,
                                         std::int32_t group) {
  std::int32_t longest = 0;
  if (group < groups.count) {
    const GroupRows rows = rows_of(groups, p, group);
#pragma unroll 1
    for (std::int32_t row = rows.first; row < rows.last; ++row) {
      longest = max(longest, length_of(p, row, errors));
    }
  }
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(longest) + kTokensPerBlock - 1U) / kTokensPerBlock);
}

/// The same as a function of its own, for what most calls never come to: short code stays in the instruction cache.
__device__ __noinline__ inline std::int32_t far_blocks_of(const ScoreParams& p, const RowGroups& groups,
                                                          const KernelErrorView& errors, std::int32_t group) {
  return blocks_of(p, groups, errors, group);
}

inline constexpr std::int32_t kPooledShare = 48;  ///< key blocks of a thread block from which on there are pools
inline constexpr std::int32_t kPoolOf = 10;       ///< one of so many blocks goes to the pool

/// Which key blocks of a group are in which list.
struct Deal {
  bool samples = false;
  std::int32_t shortest = 0;  ///< group with a pool; 0: none has

  __device__ std::int32_t sample_of(std::int32_t blocks) const {
    return samples ? (blocks + kSampleEvery - 1) / kSampleEvery : 0;
  }
  __device__ std::int32_t pool_of(std::int32_t blocks) const {
    return shortest == 0 || blocks < shortest ? 0 : (blocks - sample_of(blocks)) / kPoolOf;
  }
  __device__ std::int32_t rest_of(std::int32_t blocks) const {
    return blocks - sample_of(blocks) - pool_of(blocks);
  }
};

/// Walks through a thread block's part of a list, group by group. By all lanes of a warp.
class GroupWalk {
 public:
  /// Measures the groups. `sifts`: samples go first where shares are long enough.
  __device__ GroupWalk(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors, bool sifts);

  __device__ const Deal& deal() const { return deal_; }
  /// Key blocks of a thread block, on average.
  __device__ std::int32_t share() const { return static_cast<std::int32_t>(total_ / gridDim.x); }
  __device__ std::int32_t groups() const { return groups_.count; }
  /// Key blocks of a group.
  __device__ std::int32_t blocks_of_group(std::int32_t group) const {
    return group >= chunk_ && group < chunk_ + kWarp ? __shfl_sync(kAllLanes, blocks_, group - chunk_)
                                                     : far_blocks_of(p_, groups_, errors_, group);
  }
  __device__ GroupRows rows(std::int32_t group) const { return rows_of(groups_, p_, group); }

  /// Goes to the first group of this thread block's part of the samples or of the rest; false if there is none.
  __device__ bool begin(bool samples);
  /// Goes to the next one.
  __device__ bool next();

  __device__ std::int32_t group() const { return group_; }
  /// Numbers [first, first + count) of the group's in the list are this thread block's.
  __device__ std::int32_t first() const { return block_; }
  __device__ std::int32_t count() const { return count_; }

 private:
  /// Sum over all groups.
  template <typename ValueOf>
  __device__ __forceinline__ std::uint32_t add_up(ValueOf value_of) const {
    std::uint32_t sum = __reduce_add_sync(kAllLanes, static_cast<unsigned>(value_of(deal_, blocks_)));
    if (groups_.count > kWarp) {
#pragma unroll 1
      for (std::int32_t chunk = kWarp; chunk < groups_.count; chunk += kWarp) {
        const std::int32_t blocks = far_blocks_of(p_, groups_, errors_, chunk + lane_index());
        sum += __reduce_add_sync(kAllLanes, static_cast<unsigned>(value_of(deal_, blocks)));
      }
    }
    return sum;
  }
  __device__ std::int32_t listed(std::int32_t blocks) const {
    return samples_ ? deal_.sample_of(blocks) : deal_.rest_of(blocks);
  }
  /// Goes to the 32 groups from `chunk` on.
  __device__ void load_chunk(std::int32_t chunk) {
    if (chunk != chunk_) {
      chunk_ = chunk;
      blocks_ = far_blocks_of(p_, groups_, errors_, chunk + lane_index());
    }
    up_to_ = inclusive_warp_sum(listed(blocks_));
  }
  __device__ std::int32_t chunk_total() const { return __shfl_sync(kAllLanes, up_to_, kWarp - 1); }

  /// First of a thread block's part of so many.
  __device__ std::uint32_t part(std::uint32_t total, unsigned index) const {
    return index == gridDim.x ? total : __umulhi(total, index * groups_.share);
  }
  /// In the list that is walked. The rest is dealt so that a thread block's samples and rest together are equal parts.
  __device__ std::int32_t listed_part(unsigned index) const {
    if (samples_) {
      return static_cast<std::int32_t>(part(sample_total_, index));
    }
    const std::uint32_t both = total_ - pool_total_;
    const std::uint32_t rest = both - sample_total_;
    return static_cast<std::int32_t>(rest < 2U * gridDim.x ? part(rest, index)
                                                           : part(both, index) - part(sample_total_, index));
  }

  /// Takes the group of a lane, from a key block on.
  __device__ void take(int lane, std::int32_t block) {
    group_ = chunk_ + lane;
    block_ = block;
    count_ = min(left_, __shfl_sync(kAllLanes, listed(blocks_), lane) - block);
  }

  const ScoreParams& p_;
  const RowGroups& groups_;
  const KernelErrorView& errors_;
  Deal deal_;
  std::uint32_t total_ = 0;         ///< key blocks of all groups,
  std::uint32_t sample_total_ = 0;  ///< of the samples
  std::uint32_t pool_total_ = 0;    ///< and of the pools
  bool samples_ = false;            ///< what is walked
  std::int32_t left_ = 0;           ///< key blocks to score, the current group's included
  std::int32_t chunk_ = 0;          ///< first of the 32 groups that lanes know of
  std::int32_t blocks_ = 0;         ///< key blocks of group chunk_ + lane
  std::int32_t up_to_ = 0;          ///< in the list, of that group and of the chunk's before it
  std::int32_t group_ = 0;
  std::int32_t block_ = 0;
  std::int32_t count_ = 0;
};

__device__ __forceinline__ GroupWalk::GroupWalk(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors,
                                       bool sifts)
    : p_(p), groups_(groups), errors_(errors) {
  blocks_ = blocks_of(p_, groups_, errors_, lane_index());
  total_ = add_up([](const Deal& /*deal*/, std::int32_t blocks) { return blocks; });
  if (sifts && total_ >= static_cast<std::uint32_t>(p.sift.least_share) * gridDim.x) {
    deal_.samples = true;
    sample_total_ = add_up([](const Deal& deal, std::int32_t blocks) { return deal.sample_of(blocks); });
  }
  if (groups_.tickets != nullptr && total_ >= kPooledShare * gridDim.x) {
    deal_.shortest = share();
    pool_total_ = add_up([](const Deal& deal, std::int32_t blocks) { return deal.pool_of(blocks); });
  }
}

__device__ __forceinline__ bool GroupWalk::begin(bool samples) {
  samples_ = samples;
  load_chunk(0);
  const std::int32_t first = listed_part(blockIdx.x);
  left_ = listed_part(blockIdx.x + 1) - first;
  if (left_ == 0) {
    return false;
  }
  std::int32_t before = 0;  // of the chunks before
  unsigned beyond = __ballot_sync(kAllLanes, up_to_ > first);
#pragma unroll 1
  while (beyond == 0U) {
    before += chunk_total();
    load_chunk(chunk_ + kWarp);
    beyond = __ballot_sync(kAllLanes, before + up_to_ > first);
  }
  const int lane = __ffs(static_cast<int>(beyond)) - 1;
  take(lane, first - before - __shfl_sync(kAllLanes, up_to_ - listed(blocks_), lane));
  return true;
}

__device__ __forceinline__ bool GroupWalk::next() {
  left_ -= count_;
  if (left_ == 0) {
    return false;
  }
  unsigned nonempty =
      __ballot_sync(kAllLanes, listed(blocks_) > 0) & (~1U << static_cast<unsigned>(group_ - chunk_));
#pragma unroll 1
  while (nonempty == 0U) {
    load_chunk(chunk_ + kWarp);
    nonempty = __ballot_sync(kAllLanes, listed(blocks_) > 0);
  }
  take(__ffs(static_cast<int>(nonempty)) - 1, 0);
  return true;
}

}  // namespace echo
