#pragma once
// prefetch_maps: words of a layer that recall will look up, brought into the L2 cache before it is known which. (Since
// the call before, a step's index keys have gone through that cache.) By the claimers of all blocks, a line each.
//
// Those are the stamps of all slots, and where a call has few host blocks the map of all rows of its sessions. What a
// look-up then waits for is the cache twice instead of the memory twice. On an H200, us per call with nothing missing:
// one session 3.2 -> 3.0, 13 sessions 3.8 -> 3.65 (to fetch their maps too, 5 MB, takes 0.1 longer than not to).

#include "cache_manager/residency.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"

namespace echo {

inline constexpr std::int32_t kMostMapBlocks = 4096;  ///< host blocks of a call whose part of the map is fetched: 1 MB

/// Of the sessions of a call the `index`-th host block, all of them counted as if they were as long as can be; kNone
/// where that session is shorter.
__device__ inline std::int32_t block_of_call(const RecallParams& p, std::int32_t index) {
  const std::int32_t entry = p.block.first / p.step.query_rows + index / p.step.table_stride;
  const std::int32_t place = index % p.step.table_stride;
  const std::int32_t last = p.step.positions[(entry + 1) * p.step.query_rows - 1];
  const std::int32_t block = p.step.block_table[static_cast<std::int64_t>(entry) * p.step.table_stride + place];
  const bool right = place * kTokensPerBlock <= last && block >= 0 && block < p.layer.host_rows / kTokensPerBlock;
  return right ? block : kNone;
}

/// By thread `thread` of `threads` of the launch. May come before the kernel ahead has ended.
__device__ inline void prefetch_maps(const RecallParams& p, std::int32_t thread, std::int32_t threads) {
  constexpr std::int32_t kWords = ptx::kCacheLine / static_cast<std::int32_t>(sizeof(std::int32_t));
  static_assert(kTokensPerBlock == 2 * kWords);
  if (thread <= (p.layer.slots - 1) / kWords) {
    ptx::prefetch(p.layer.stamp + static_cast<std::int64_t>(thread) * kWords);
  }
  const std::int32_t entries =
      (p.block.first + p.block.count - 1) / p.step.query_rows - p.block.first / p.step.query_rows + 1;
  const std::int64_t blocks = static_cast<std::int64_t>(entries) * p.step.table_stride;
  if (blocks <= min(threads, kMostMapBlocks) && thread < blocks) {
    if (const std::int32_t block = block_of_call(p, thread); block != kNone) {
      const std::int32_t* words = p.layer.slot_of + static_cast<std::int64_t>(block) * kTokensPerBlock;
      ptx::prefetch(words);
      ptx::prefetch(words + kWords);
    }
  }
}

}  // namespace echo
