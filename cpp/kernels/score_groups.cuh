#pragma once
// How the work of a score call is cut up: rows of a block that share a block table form groups, the key blocks of all
// groups one long list, and each thread block takes an equal part of it. Lengths are known on the device only, so each
// warp finds its part for itself, from the positions of the rows. To go on to another group takes a thread block as
// long as some key blocks do, and all wait for the last one: so that counts as part of the list, between groups.

#include <cstdint>

#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {

/// Going on to another group counts as so many key blocks, where there are at most kWarp groups and each thread block
/// has at least kSwitchShare key blocks.
inline constexpr std::int32_t kSwitchBlocks = 6;
inline constexpr std::int32_t kSwitchShare = 12;

/// Much is missing where the last score of the layer was asked for more rows than that for each key block of a share:
/// more than kPrefetchers thread blocks fetch in that time.
inline constexpr std::int32_t kMuchMissing = 10;

/// Into how many equal parts the list is cut.
struct ScoreParts {
  std::int32_t blocks;  ///< thread blocks that score
  std::uint32_t share;  ///< of each, in units of 2^-32, rounded up
};

/// The groups of a row block, in order of their rows. Each batch entry has as many; the last ones may be empty.
struct RowGroups {
  std::int32_t first_entry;
  std::int32_t per_entry;
  std::int32_t rows;  ///< of a group, at most
  std::int32_t count;
  ScoreParts parts;
  /// If there are so many key blocks, and rows are likely to be missing, the last thread blocks prefetch, and the share
  /// of the others is larger: some do, or more where much is missing.
  std::uint32_t enough;
  ScoreParts with_some;
  ScoreParts with_more;
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

/// Scores that a row of this position gets: none if it is padding or out of bounds.
__device__ inline std::int32_t length_at(const ScoreParams& p, std::int32_t position, const KernelErrorView& errors) {
  const std::int32_t length = checked_position(p.step, position, errors) + 1;
  if (length > p.score_stride) {
    errors.raise(KernelError::bad_position);
    return 0;
  }
  return length;
}

__device__ inline std::int32_t length_of(const ScoreParams& p, std::int32_t row, const KernelErrorView& errors) {
  return length_at(p, p.step.positions[row], errors);
}

__device__ inline std::int32_t blocks_for_length(std::int32_t length) {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(length) + kTokensPerBlock - 1U) / kTokensPerBlock);
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
  return blocks_for_length(longest);
}

/// The same as a function of its own, for what most calls never come to: short code stays in the instruction cache.
__device__ __noinline__ inline std::int32_t far_blocks_of(const ScoreParams& p, const RowGroups& groups,
                                                          const KernelErrorView& errors, std::int32_t group) {
  return blocks_of(p, groups, errors, group);
}

/// Of groups lane and kWarp + lane, where there are more than kWarp: both rows' positions are loaded at once.
__device__ __noinline__ inline int2 blocks_of_two(const ScoreParams& p, const RowGroups& groups,
                                                  const KernelErrorView& errors) {
  const std::int32_t second = kWarp + lane_index();
  if (p.step.query_rows > 1) {
    return {blocks_of(p, groups, errors, lane_index()), blocks_of(p, groups, errors, second)};
  }
  const std::int32_t first_position = p.step.positions[rows_of(groups, p, lane_index()).first];
  const std::int32_t position = second < groups.count ? p.step.positions[rows_of(groups, p, second).first] : kNone;
  return {blocks_for_length(length_at(p, first_position, errors)), blocks_for_length(length_at(p, position, errors))};
}

/// Walks through a thread block's part of the list, group by group. By all lanes of a warp.
class GroupWalk {
 public:
  /// Measures the groups.
  __device__ GroupWalk(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors)
      : p_(p), groups_(groups), errors_(errors) {
    const auto all = static_cast<std::int32_t>(gridDim.x);
    const bool may_prefetch = groups.with_some.blocks != all;
    std::int32_t tick = 0;
    std::int32_t missed = 0;
    std::int32_t expected = 0;
    if (may_prefetch) {  // on their way together with positions; short calls do not wait for them
      tick = ptx::load_ahead(p.step.tick);
      missed = ptx::load_ahead(&p.layer.replacement->missed);
      expected = ptx::load_ahead(&p.layer.replacement->expected);
    }
    if (groups.count <= kWarp) {
      blocks_ = blocks_of(p, groups, errors, lane_index());
    } else {
      const int2 blocks = blocks_of_two(p, groups, errors);
      blocks_ = blocks.x;
      next_blocks_ = blocks.y;
    }
    total_ = add_up();
    parts_ = groups.parts;
    if (may_prefetch && total_ >= groups.enough) {
      if (tick + p.block.tick_offset - missed <= kExpectMisses) {
        const auto scorers = static_cast<std::uint32_t>(groups.with_some.blocks);
        much_missing_ =
            static_cast<std::uint32_t>(expected) * scorers > static_cast<std::uint32_t>(kMuchMissing) * total_;
        parts_ = much_missing_ ? groups.with_more : groups.with_some;
      }
    }
    if (groups.count <= kWarp && total_ >= static_cast<std::uint32_t>(kSwitchShare * all)) {
      const unsigned there = __ballot_sync(kAllLanes, blocks_ > 0);
      before_ = kSwitchBlocks * __popc(there & ((1U << lane_index()) - 1U));
      total_ += static_cast<std::uint32_t>(kSwitchBlocks * (__popc(there) - 1));
    }
  }

  /// Goes to the first group of this thread block's part; false if there is none.
  __device__ bool begin();
  /// Goes to the next one.
  __device__ bool next();

  /// Key blocks of this thread block's part, from the current group's first on.
  __device__ std::int32_t left() const { return left_; }
  /// Thread blocks that have a part; those behind them prefetch.
  __device__ std::int32_t scorers() const { return parts_.blocks; }
  /// Whether more is likely to be missing than there is time to fetch; only where some prefetch.
  __device__ bool much_missing() const { return much_missing_; }
  /// Key blocks of the group.
  __device__ std::int32_t blocks() const { return __shfl_sync(kAllLanes, blocks_, group_ - chunk_); }
  __device__ GroupRows rows() const { return rows_of(groups_, p_, group_); }
  /// Blocks [first, first + count) of the group are this thread block's.
  __device__ std::int32_t first() const { return first_; }
  __device__ std::int32_t count() const { return count_; }
  __device__ std::int32_t query_rows() const { return p_.step.query_rows; }
  /// First row of a batch entry that this call scores.
  __device__ std::int32_t first_row(std::int32_t entry) const {
    return max(entry * p_.step.query_rows, p_.block.first);
  }

 private:
  /// Key blocks of group chunk + lane.
  __device__ std::int32_t blocks_in(std::int32_t chunk) const {
    return chunk == kWarp ? next_blocks_ : far_blocks_of(p_, groups_, errors_, chunk + lane_index());
  }
  /// Of all groups. The lanes know of the first ones.
  __device__ std::uint32_t add_up() const {
    std::uint32_t sum = __reduce_add_sync(kAllLanes, static_cast<unsigned>(blocks_));
    if (groups_.count > kWarp) {
#pragma unroll 1
      for (std::int32_t chunk = kWarp; chunk < groups_.count; chunk += kWarp) {
        sum += __reduce_add_sync(kAllLanes, static_cast<unsigned>(blocks_in(chunk)));
      }
    }
    return sum;
  }
  /// Goes to the 32 groups from `chunk` on.
  __device__ void load_chunk(std::int32_t chunk) {
    if (chunk != chunk_) {
      chunk_ = chunk;
      blocks_ = blocks_in(chunk);
    }
    up_to_ = inclusive_warp_sum(blocks_);
  }
  __device__ std::int32_t chunk_total() const { return __shfl_sync(kAllLanes, up_to_, kWarp - 1); }

  /// First key block of a thread block's part, among those of all groups.
  __device__ std::int32_t part(unsigned index) const {
    const auto first = static_cast<std::int32_t>(
        index >= static_cast<unsigned>(parts_.blocks) ? total_ : __umulhi(total_, index * parts_.share));
    if (groups_.count > kWarp) {
      return first;
    }
    const std::int32_t of_groups = up_to_ - blocks_;  // key blocks before the lane's group
    const std::int32_t in_group = min(first - before_ - of_groups, blocks_);
    return __reduce_max_sync(kAllLanes, in_group >= 0 ? of_groups + in_group : 0);
  }

  /// Takes the group of a lane, from a key block on.
  __device__ void take(int lane, std::int32_t block) {
    group_ = chunk_ + lane;
    first_ = block;
    count_ = min(left_, __shfl_sync(kAllLanes, blocks_, lane) - block);
  }

  const ScoreParams& p_;
  const RowGroups& groups_;
  const KernelErrorView& errors_;
  std::uint32_t total_;  ///< what is shared out
  ScoreParts parts_;
  bool much_missing_ = false;
  std::int32_t before_ = 0;       ///< of it, what counts for going on to the lane's group and those before it
  std::int32_t left_ = 0;         ///< of this thread block's part, the current group's included
  std::int32_t chunk_ = 0;        ///< first of the 32 groups that lanes know of
  std::int32_t blocks_ = 0;       ///< key blocks of group chunk_ + lane
  std::int32_t next_blocks_ = 0;  ///< of group kWarp + lane
  std::int32_t up_to_ = 0;        ///< of that group and of the chunk's before it
  std::int32_t group_ = 0;
  std::int32_t first_ = 0;
  std::int32_t count_ = 0;
};

__device__ __forceinline__ bool GroupWalk::begin() {
  up_to_ = inclusive_warp_sum(blocks_);
  const std::int32_t first = part(blockIdx.x);
  left_ = part(blockIdx.x + 1) - first;
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
  take(lane, first - before - __shfl_sync(kAllLanes, up_to_ - blocks_, lane));
  return true;
}

__device__ __forceinline__ bool GroupWalk::next() {
  left_ -= count_;
  if (left_ == 0) {
    return false;
  }
  unsigned nonempty = __ballot_sync(kAllLanes, blocks_ > 0) & (~1U << static_cast<unsigned>(group_ - chunk_));
#pragma unroll 1
  while (nonempty == 0U) {
    load_chunk(chunk_ + kWarp);
    nonempty = __ballot_sync(kAllLanes, blocks_ > 0);
  }
  take(__ffs(static_cast<int>(nonempty)) - 1, 0);
  return true;
}

}  // namespace echo
