#pragma once
// The top-k of a list of scored tokens in shared memory, in any order, by a block of 1,024 threads.
//
// An entry is the ordered key above the complement of the position: entries are distinct, and the larger of two is the
// one that is selected, ties included. The k-th largest is searched in bins of equal width over the range of the keys,
// then over that of a bin, until few entries are left, which are compared with each other. What is at least as large is
// marked in a bitmap over the row's positions; the bits before an entry's own are its place in the selection.
// Cost: two or three rounds over the list, most of it barriers; 1.5 us (counted, not measured).

#include "kernels/select_passes.cuh"

namespace echo::top_k {

inline constexpr int kFew = 128;
inline constexpr int kGroupBits = 128;  ///< positions that are counted together
inline constexpr int kGroupWords = kGroupBits / 32;

__device__ inline std::uint64_t entry_of(std::uint32_t key, std::int32_t position) {
  return static_cast<std::uint64_t>(key) << 32 | ~static_cast<std::uint32_t>(position);
}
__device__ inline std::uint32_t key_of(std::uint64_t entry) { return static_cast<std::uint32_t>(entry >> 32); }
__device__ inline std::int32_t position_in(std::uint64_t entry) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(entry));
}

/// Shared memory of a search in a list.
struct ListSearch {
  std::uint64_t few[kFew];
  std::uint64_t found;
  std::uint32_t lowest[kWarps];
  std::uint32_t highest[kWarps];
  std::int32_t few_count;
};

/// Entries [first, first + 2^bits).
struct Range {
  std::uint64_t first;
  int bits;

  __device__ bool holds(std::uint64_t entry) const { return bits == 64 || (entry - first) >> bits == 0U; }
};

/// The range of all entries; clears the histogram. Complete for all threads.
__device__ inline Range range_of(const std::uint64_t* list, std::int32_t count, ListSearch& search,
                                 std::int32_t* histogram) {
  std::uint32_t lowest = 0xFFFFFFFFU;
  std::uint32_t highest = 0U;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    const std::uint32_t key = key_of(list[i]);
    lowest = min(lowest, key);
    highest = max(highest, key);
  }
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (lane_index() == 0) {
    search.lowest[warp_index()] = lowest;
    search.highest[warp_index()] = highest;
  }
  if (threadIdx.x == 0) {
    search.few_count = 0;
  }
  clear(histogram);
  __syncthreads();
  static_assert(kWarps == kWarp);
  lowest = __reduce_min_sync(kAllLanes, search.lowest[lane_index()]);
  highest = __reduce_max_sync(kAllLanes, search.highest[lane_index()]);
  return {static_cast<std::uint64_t>(lowest) << 32, 64 - __clz(static_cast<int>(highest - lowest))};
}

/// Which of the few entries has `wanted - 1` larger ones among them: a warp takes an entry.
__device__ inline void compare_few(std::int32_t wanted, ListSearch& search) {
  const std::int32_t count = min(search.few_count, kFew);
  for (std::int32_t i = warp_index(); i < count; i += kWarps) {
    const std::uint64_t entry = search.few[i];
    std::int32_t larger = 0;
    for (std::int32_t first = 0; first < count; first += kWarp) {
      const std::int32_t j = first + lane_index();
      larger += __popc(__ballot_sync(kAllLanes, j < count && search.few[j] > entry));
    }
    if (larger == wanted - 1) {
      search.found = entry;
    }
  }
}

/// The `wanted`-th largest of `count` entries, complete for all threads; 1 <= wanted <= count.
__device__ inline std::uint64_t kth_largest(const std::uint64_t* list, std::int32_t count, std::int32_t wanted,
                                            ListSearch& search, Scan& scan, std::int32_t* histogram) {
  Range range = range_of(list, count, search, histogram);
  for (;;) {
    const int shift = max(0, range.bits - kDigitBits);
    for (std::int32_t first = 0; first < count; first += kThreads) {
      const std::int32_t i = first + static_cast<std::int32_t>(threadIdx.x);
      const std::uint64_t entry = i < count ? list[i] : 0U;
      top_k::count(histogram, static_cast<std::uint32_t>((entry - range.first) >> shift),
                   i < count && range.holds(entry));
    }
    __syncthreads();
    const Digit digit = find_digit(histogram, wanted, scan);
    range = {range.first + (static_cast<std::uint64_t>(digit.value) << shift), shift};
    wanted = digit.wanted;
    if (digit.count <= kFew || shift == 0) {
      break;
    }
    clear(histogram);
    __syncthreads();
  }
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    if (range.holds(list[i])) {
      const std::int32_t at = atomicAdd(&search.few_count, 1);
      if (at < kFew) {
        search.few[at] = list[i];
      }
    }
  }
  __syncthreads();
  compare_few(wanted, search);
  __syncthreads();
  return search.found;
}

/// Positions of a row as bits, in shared memory.
struct Bitmap {
  std::uint32_t* words;   ///< [groups, kGroupWords]
  std::uint16_t* before;  ///< [groups] marked positions of the groups before
  std::int32_t groups;

  __device__ void clear() const {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < groups; i += kThreads) {
      reinterpret_cast<uint4*>(words)[i] = uint4{0U, 0U, 0U, 0U};
    }
  }
  __device__ void mark(std::int32_t position) const { atomicOr(words + position / 32, 1U << (position % 32)); }
  __device__ std::int32_t marked(std::int32_t group) const {
    const uint4 bits = reinterpret_cast<const uint4*>(words)[group];
    return __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
  }
  /// Marked positions before this one.
  __device__ std::int32_t rank(std::int32_t position) const {
    const std::int32_t word = position / 32;
    std::int32_t rank = before[position / kGroupBits] + __popc(words[word] & ((1U << (position % 32)) - 1U));
    for (std::int32_t earlier = word / kGroupWords * kGroupWords; earlier < word; ++earlier) {
      rank += __popc(words[earlier]);
    }
    return rank;
  }
  /// Fills `before`, once all is marked; complete for all threads.
  __device__ void count(std::int32_t* sums) const {
    const std::int32_t per_thread = (groups + kThreads - 1) / kThreads;
    const std::int32_t first = static_cast<std::int32_t>(threadIdx.x) * per_thread;
    const std::int32_t end = min(first + per_thread, groups);
    std::int32_t own = 0;
    for (std::int32_t group = first; group < end; ++group) {
      own += marked(group);
    }
    std::int32_t total = 0;
    std::int32_t next = exclusive_sum<kThreads>(own, total, sums);
    for (std::int32_t group = first; group < end; ++group) {
      before[group] = static_cast<std::uint16_t>(next);
      next += marked(group);
    }
    __syncthreads();
  }
};

/// Writes the positions of the k entries from `least` on, in order. `sorted` has room for k; the bitmap is clear.
__device__ inline void write_in_order(const std::uint64_t* list, std::int32_t count, std::uint64_t least,
                                      std::int32_t k, const Bitmap& bitmap, std::int32_t* sums, std::int32_t* sorted,
                                      std::int32_t* selection) {
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    if (list[i] >= least) {
      bitmap.mark(position_in(list[i]));
    }
  }
  __syncthreads();
  bitmap.count(sums);
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    if (list[i] >= least) {
      const std::int32_t position = position_in(list[i]);
      const std::int32_t rank = bitmap.rank(position);
      if (rank < k) {  // always, if no token is listed twice
        sorted[rank] = position;
      }
    }
  }
  __syncthreads();
  for (auto j = static_cast<std::int32_t>(threadIdx.x); j < k; j += kThreads) {
    selection[j] = sorted[j];
  }
}

}  // namespace echo::top_k
