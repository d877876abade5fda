#pragma once
// How the work of a score call is cut up: rows of a block that share a block table form groups, the key blocks of all
// groups one long list, and each thread block takes an equal part of it. Lengths are known on the device only, so each
// warp finds its part for itself, from the positions of the rows.

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

/// The key blocks that a thread block scores, group by group. All lanes of a warp walk together.
class GroupWalk {
 public:
  __device__ GroupWalk(const ScoreParams& p, const RowGroups& groups, const KernelErrorView& errors)
      : p_(p), groups_(groups), errors_(errors) {}

  /// Goes to the first group of this thread block; false if there is none.
  __device__ bool begin();
  /// Goes to the next one.
  __device__ bool next();

  __device__ GroupRows rows() const { return rows_of(groups_, p_, group_); }
  /// Key blocks [block, block + count) of the group are this thread block's.
  __device__ std::int32_t block() const { return block_; }
  __device__ std::int32_t count() const { return count_; }

 private:
  /// Loads how many key blocks the 32 groups from chunk_ on have: as many as the furthest row of a group.
  __device__ void load_chunk() {
    const std::int32_t group = chunk_ + lane_index();
    std::int32_t longest = 0;
    if (group < groups_.count) {
      const GroupRows rows = rows_of(groups_, p_, group);
#pragma unroll 1
      for (std::int32_t row = rows.first; row < rows.last; ++row) {
        longest = max(longest, length_of(p_, row, errors_));
      }
    }
    counts_ = longest / kTokensPerBlock + (longest % kTokensPerBlock != 0 ? 1 : 0);
  }

  /// Takes the group of a lane, from a key block on.
  __device__ void take(int lane, std::int32_t block) {
    group_ = chunk_ + lane;
    block_ = block;
    const std::int32_t all = __shfl_sync(kAllLanes, counts_, lane) - block;
    count_ = left_ < all ? static_cast<std::int32_t>(left_) : all;
  }

  const ScoreParams& p_;
  const RowGroups& groups_;
  const KernelErrorView& errors_;
  std::int64_t left_ = 0;    ///< key blocks to score, the current group's included
  std::int32_t chunk_ = 0;   ///< first of the 32 groups that lanes know of
  std::int32_t counts_ = 0;  ///< key blocks of group chunk_ + lane
  std::int32_t group_ = 0;
  std::int32_t block_ = 0;
  std::int32_t count_ = 0;
};

__device__ inline bool GroupWalk::begin() {
  std::int64_t total = 0;
#pragma unroll 1
  for (chunk_ = 0; chunk_ < groups_.count; chunk_ += kWarp) {
    load_chunk();
    total += __reduce_add_sync(kAllLanes, counts_);
  }
  const auto part = static_cast<std::int64_t>(static_cast<std::uint64_t>(total) / gridDim.x);
  const auto more = static_cast<std::int64_t>(total - part * gridDim.x);  // thread blocks that take one more
  const std::int64_t index = blockIdx.x;
  const std::int64_t first = part * index + min(index, more);
  left_ = part + (index < more ? 1 : 0);
  if (left_ == 0) {
    return false;
  }
  chunk_ = 0;
  std::int64_t before = 0;  // key blocks of the chunks before
  for (;; chunk_ += kWarp) {
    if (groups_.count > kWarp) {  // otherwise the lanes still know
      load_chunk();
    }
    const std::int32_t up_to = inclusive_warp_sum(counts_);
    const unsigned beyond = __ballot_sync(kAllLanes, before + up_to > first);
    if (beyond != 0U) {
      const int lane = __ffs(static_cast<int>(beyond)) - 1;
      before += __shfl_sync(kAllLanes, up_to - counts_, lane);
      take(lane, static_cast<std::int32_t>(first - before));
      return true;
    }
    before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
}

__device__ inline bool GroupWalk::next() {
  left_ -= count_;
  if (left_ == 0) {
    return false;
  }
  unsigned nonempty = __ballot_sync(kAllLanes, counts_ > 0) & (~1U << static_cast<unsigned>(group_ - chunk_));
#pragma unroll 1
  while (nonempty == 0U) {
    chunk_ += kWarp;
    load_chunk();
    nonempty = __ballot_sync(kAllLanes, counts_ > 0);
  }
  take(__ffs(static_cast<int>(nonempty)) - 1, 0);
  return true;
}

}  // namespace echo
