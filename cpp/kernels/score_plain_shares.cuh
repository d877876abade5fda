#pragma once
// Which key blocks a thread block of score_plain has. The same parts as in score_groups.cuh, where a call has at most
// kRows rows of an entry: straight code for up to 32 batch entries, a lane each, and functions of their own, which most
// calls never fetch, for more. All warps of a thread block find the same part by themselves.

#include <cstdint>

#include "kernels/kernel_errors.hpp"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/score_groups.cuh"
#include "kernels/warp.cuh"

namespace echo {

/// Batch entries of a row block, and how their key blocks are shared out.
struct EntryShares {
  std::int32_t first_entry;
  std::int32_t count;
  std::uint32_t part;         ///< of a thread block, in units of 2^-32, rounded up
  std::uint32_t limit;        ///< positions that can be scored are below it
  std::uint32_t host_blocks;  ///< in the index cache
  std::int32_t long_share;    ///< key blocks of a thread block from which on two warps fetch
};

/// A value that lanes agree on, so that the compiler knows it, too: what follows from it is worked out once per warp.
template <typename T>
__device__ __forceinline__ T agreed(T value) {
  return __reduce_max_sync(kAllLanes, value);
}

/// A value that the compiler keeps, since it cannot see where it comes from: it is not worked out anew in a loop.
template <typename T>
__device__ __forceinline__ T kept(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 4) {
    asm volatile("" : "+r"(value));
  } else {
    asm volatile("" : "+l"(value));
  }
  return value;
}

/// An address in shared memory, both.
__device__ __forceinline__ std::uint32_t agreed_address(const void* pointer) {
  return agreed(kept(ptx::shared_address(pointer)));
}

/// Says that a position or a host block is none; a function of its own because nobody comes to it.
__device__ __noinline__ inline void raise_bad_position(volatile std::uint32_t* words) {
  KernelErrorView{words}.raise(KernelError::bad_position);
}

/// Key blocks of an entry, of which the call has at most kRows rows.
template <int kRows>
__device__ __forceinline__ std::int32_t entry_blocks(const ScoreParams& p, const EntryShares& shares,
                                                     const KernelErrorView& errors, std::int32_t index) {
  const std::int32_t entry = shares.first_entry + index;
  const std::int32_t first = max(entry * p.step.query_rows, p.block.first);
  const std::int32_t behind = p.block.first + p.block.count;
  const std::int32_t end = index < shares.count ? min((entry + 1) * p.step.query_rows, behind) : 0;
  std::int32_t positions[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    positions[i] = p.step.positions[min(first + i, behind - 1)];
  }
  std::uint32_t longest = 0;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int32_t position = first + i < end ? positions[i] : kNone;
    const bool there = static_cast<std::uint32_t>(position) < shares.limit;
    bad = bad || (!there && position != kNone);
    longest = max(longest, there ? static_cast<std::uint32_t>(position) + 1U : 0U);
  }
  if (bad) [[unlikely]] {
    raise_bad_position(errors.words);
  }
  return static_cast<std::int32_t>((longest + kTokensPerBlock - 1U) / kTokensPerBlock);
}

/// The same as a function of its own, for what most calls never come to.
template <int kRows>
__device__ __noinline__ std::int32_t far_entry_blocks(const ScoreParams& p, const EntryShares& shares,
                                                      const KernelErrorView& errors, std::int32_t index) {
  return entry_blocks<kRows>(p, shares, errors, index);
}

/// First key block of a thread block's part of all of them.
__device__ __forceinline__ std::int32_t part_of(const EntryShares& shares, std::uint32_t all, unsigned index) {
  return static_cast<std::int32_t>(index == gridDim.x ? all : __umulhi(all, index * shares.part));
}

/// Where a thread block begins: {its key blocks, index of the entry, first block of that, blocks of the entry of the
/// lane among the kWarp that the first one is one of}. Where there are more than kWarp entries.
template <int kRows>
__device__ __noinline__ int4 far_begin(const ScoreParams& p, const EntryShares& shares, const KernelErrorView& errors) {
  std::int32_t blocks = entry_blocks<kRows>(p, shares, errors, lane_index());
  const std::int32_t next_blocks = entry_blocks<kRows>(p, shares, errors, kWarp + lane_index());
  std::uint32_t all = __reduce_add_sync(kAllLanes, static_cast<unsigned>(blocks + next_blocks));
#pragma unroll 1
  for (std::int32_t chunk = 2 * kWarp; chunk < shares.count; chunk += kWarp) {
    all += __reduce_add_sync(kAllLanes,
                             static_cast<unsigned>(far_entry_blocks<kRows>(p, shares, errors, chunk + lane_index())));
  }
  const std::int32_t first = part_of(shares, all, blockIdx.x);
  const std::int32_t left = part_of(shares, all, blockIdx.x + 1) - first;
  std::int32_t chunk = 0;
  if (left == 0) {
    return make_int4(0, 0, 0, 0);
  }
  std::int32_t before = 0;  // of the chunks before
  std::int32_t up_to = inclusive_warp_sum(blocks);
  unsigned beyond = __ballot_sync(kAllLanes, up_to > first);
#pragma unroll 1
  while (beyond == 0U) {
    before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
    chunk += kWarp;
    blocks = chunk == kWarp ? next_blocks : far_entry_blocks<kRows>(p, shares, errors, chunk + lane_index());
    up_to = inclusive_warp_sum(blocks);
    beyond = __ballot_sync(kAllLanes, before + up_to > first);
  }
  const int lane = __ffs(static_cast<int>(beyond)) - 1;
  return make_int4(left, chunk + lane, first - before - __shfl_sync(kAllLanes, up_to - blocks, lane), blocks);
}

/// Goes to the next kWarp entries of which any has key blocks: {index of the first entry of them, blocks of the
/// lane's}.
template <int kRows>
__device__ __noinline__ int2 far_next(const ScoreParams& p, const EntryShares& shares, const KernelErrorView& errors,
                                      std::int32_t index) {
  std::int32_t chunk = index;
  std::int32_t blocks = 0;
#pragma unroll 1
  do {
    chunk += kWarp;
    blocks = far_entry_blocks<kRows>(p, shares, errors, chunk + lane_index());
  } while (__ballot_sync(kAllLanes, blocks > 0) == 0U);
  return make_int2(chunk, blocks);
}

/// Walks through a thread block's part, entry by entry. By all lanes of a warp.
template <int kRows>
class EntryWalk {
 public:
  /// At the first entry, if there is any.
  __device__ __forceinline__ EntryWalk(const ScoreParams& p, const EntryShares& shares, const KernelErrorView& errors)
      : p_(p), shares_(shares), errors_(errors) {
    if (shares.count > kWarp) [[unlikely]] {
      const int4 begin = far_begin<kRows>(p, shares, errors);
      left_ = agreed(begin.x);
      index_ = agreed(begin.y);
      first_ = agreed(begin.z);
      blocks_ = begin.w;
    } else {
      blocks_ = entry_blocks<kRows>(p, shares, errors, lane_index());
      const std::int32_t up_to = inclusive_warp_sum(blocks_);
      std::uint32_t all = __reduce_add_sync(kAllLanes, static_cast<unsigned>(blocks_));
      const unsigned there = __ballot_sync(kAllLanes, blocks_ > 0);
      const std::int32_t a_switch = all >= kSwitchShare * gridDim.x ? kSwitchBlocks : 0;
      all += static_cast<std::uint32_t>(a_switch * (__popc(there) - 1));
      // Key blocks before the lane's entry; and with them what counts for going on to it and to those before.
      const std::int32_t of_entries = up_to - blocks_;
      const std::int32_t before = of_entries + a_switch * __popc(there & ((1U << lane_index()) - 1U));
      const auto part = [&](unsigned index) {
        const std::int32_t in_entry = min(part_of(shares, all, index) - before, blocks_);
        return __reduce_max_sync(kAllLanes, in_entry >= 0 ? of_entries + in_entry : 0);
      };
      const std::int32_t first = part(blockIdx.x);
      left_ = part(blockIdx.x + 1) - first;
      index_ = __ffs(static_cast<int>(__ballot_sync(kAllLanes, up_to > first))) - 1;
      first_ = first - of_lane(index_, of_entries);
    }
    count_ = min(left_, of_lane(index_ % kWarp, blocks_) - first_);
  }

  /// Whether the thread block has a part.
  __device__ bool any() const { return left_ > 0; }
  /// Goes to the next entry; false if there is none.
  __device__ __forceinline__ bool next() {
    left_ -= count_;
    if (left_ == 0) {
      return false;
    }
    const int before = index_ % kWarp;
    unsigned nonempty = __ballot_sync(kAllLanes, blocks_ > 0) & (~1U << before);
    index_ -= before;
    if (nonempty == 0U) [[unlikely]] {
      const int2 far = far_next<kRows>(p_, shares_, errors_, index_);
      index_ = agreed(far.x);
      blocks_ = far.y;
      nonempty = __ballot_sync(kAllLanes, blocks_ > 0);
    }
    ++queries_;
    const int lane = __ffs(static_cast<int>(nonempty)) - 1;
    index_ += lane;
    first_ = 0;
    count_ = min(left_, of_lane(lane, blocks_));
    return true;
  }

  /// Counts the entries of the thread block; where the queries are follows from that.
  __device__ std::int32_t queries() const { return queries_; }
  __device__ std::int32_t entry() const { return shares_.first_entry + index_; }
  __device__ GroupRows rows() const {
    return {entry(), max(entry() * p_.step.query_rows, p_.block.first),
            min((entry() + 1) * p_.step.query_rows, p_.block.first + p_.block.count)};
  }
  /// Blocks [first, first + count) of the entry are this thread block's.
  __device__ std::int32_t first() const { return first_; }
  __device__ std::int32_t count() const { return count_; }
  /// Key blocks of this thread block's part, from the current entry's first on.
  __device__ std::int32_t left() const { return left_; }

 private:
  /// A lane's value, at least 0.
  __device__ static std::int32_t of_lane(int lane, std::int32_t value) {
    return agreed(lane_index() == lane ? value : 0);
  }

  const ScoreParams& p_;
  const EntryShares& shares_;
  const KernelErrorView& errors_;
  std::int32_t blocks_ = 0;  ///< key blocks of the lane's entry, among the kWarp that the current one is one of
  std::int32_t left_ = 0;
  std::int32_t queries_ = 0;
  std::int32_t index_ = 0;  ///< of the entry
  std::int32_t first_ = 0;
  std::int32_t count_ = 0;
};

}  // namespace echo
