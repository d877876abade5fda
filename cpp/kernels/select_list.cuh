#pragma once
// The top-k of a list of scored tokens, in any order, by a block.
//
// An entry is the ordered key above the complement of the position: entries are distinct, and the larger of two is the
// one that is selected, ties included. All keys are at or above a bound. Entries lie in shared memory and are counted
// in bins that are the wider the further above the bound they lie, 64 for each power of two; a bin that holds the k-th
// and many others is divided further. Few entries are compared with each other. What is selected is marked in a bitmap
// over the row's positions; once it is known how many marks there are before each part of it, all entries that are
// selected are put where they belong.
// Cost: three rounds over the list by one multiprocessor, one over the bitmap, two prefix sums, eight barriers. All of
// that is in rolled loops: in a layer the code has to be fetched anew, which takes longer than to execute it.

#include "kernels/select_passes.cuh"

namespace echo::top_k {

inline constexpr int kListThreads = 1024;
inline constexpr int kListWarps = kListThreads / kWarp;
inline constexpr int kCounters = kListThreads / 2;  ///< threads that count marks
inline constexpr int kFew = 128;
inline constexpr std::uint32_t kGroupBits = 64;  ///< positions that are counted together

__device__ inline std::uint64_t entry_of(std::uint32_t key, std::int32_t position) {
  return static_cast<std::uint64_t>(key) << 32 | ~static_cast<std::uint32_t>(position);
}
__device__ inline std::uint32_t key_of(std::uint64_t entry) { return static_cast<std::uint32_t>(entry >> 32); }
__device__ inline std::int32_t position_in(std::uint64_t entry) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(entry));
}

/// Entries [first, first + 2^bits).
struct Range {
  std::uint64_t first;
  int bits;
};

/// The bin of a key that lies so far above the bound: exponent and six bits of it as a float.
__device__ inline std::uint32_t coarse_bin(std::uint32_t distance) {
  return (__float_as_uint(__uint2float_rz(distance | 1U)) >> 17) - (127U << 6);
}
__device__ inline Range coarse_range(std::uint32_t bin, std::uint32_t bound) {
  const int shift = static_cast<int>(bin >> 6) - 6;
  const std::uint32_t leading = 64U | (bin & 63U);
  const std::uint32_t distance = (shift >= 0 ? leading << shift : leading >> -shift) & ~1U;
  return {static_cast<std::uint64_t>(bound + distance) << 32, 32 + max(shift, 1)};
}

/// A list in shared memory. A thread takes the same entries in each round.
struct List {
  std::uint64_t* entries;
  std::int32_t count;

  /// Calls visit(entry) for all entries.
  template <typename Visit>
  __device__ void for_each(Visit visit) const {
#pragma unroll 1
    for (auto at = static_cast<std::int32_t>(threadIdx.x); at < count; at += kListThreads) {
      visit(entries[at]);
    }
  }
};

/// Positions of a row as bits, in shared memory.
struct Bitmap {
  static constexpr std::int32_t kTogether = 4;  ///< groups of a thread

  std::uint64_t* groups;  ///< [count] kGroupBits positions each
  std::uint16_t* before;  ///< [count] marks before each group
  std::int32_t count;     ///< a multiple of kTogether

  __device__ void clear() const {
#pragma unroll 1
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count / 2; i += kListThreads) {
      reinterpret_cast<uint4*>(groups)[i] = uint4{0U, 0U, 0U, 0U};
    }
  }
  __device__ void mark(std::int32_t position) const {
    const auto place = static_cast<std::uint32_t>(position);
    atomicOr(reinterpret_cast<std::uint32_t*>(groups) + place / 32U, 1U << place % 32U);
  }
  /// By the counters, once all positions, below `length`, are marked for all threads: counts marks before each group,
  /// to be used behind a barrier. `sums`: shared memory for two numbers of each of their warps.
  __device__ void count_before(std::int32_t length, std::int32_t* sums) const {
    const auto used = static_cast<std::int32_t>((static_cast<std::uint32_t>(length) + kGroupBits - 1) / kGroupBits);
    std::int32_t earlier = 0;
#pragma unroll 1
    for (std::int32_t first = 0; first < used; first += kTogether * kCounters) {
      const std::int32_t at = first + static_cast<std::int32_t>(threadIdx.x) * kTogether;
      std::int32_t up_to[kTogether] = {};
      if (at < used) {
        const auto* own = reinterpret_cast<const ulonglong2*>(groups + at);
        const ulonglong2 pairs[2] = {own[0], own[1]};
        up_to[0] = __popcll(pairs[0].x);
        up_to[1] = up_to[0] + __popcll(pairs[0].y);
        up_to[2] = up_to[1] + __popcll(pairs[1].x);
        up_to[3] = up_to[2] + __popcll(pairs[1].y);
      }
      const std::int32_t inclusive = inclusive_warp_sum(up_to[3]);
      if (lane_index() == kWarp - 1) {
        sums[warp_index()] = inclusive;
      }
      meet(kCountersMeet, kCounters);
      const auto base = static_cast<std::uint32_t>(earlier + add_up_before(sums) + inclusive - up_to[3]);
      if (at < used) {
        const auto pair = [&](std::int32_t low, std::int32_t high) {
          return base * 0x10001U + static_cast<std::uint32_t>(low | high << 16);
        };
        *reinterpret_cast<uint2*>(before + at) = {pair(0, up_to[0]), pair(up_to[1], up_to[2])};
      }
      if (first + kTogether * kCounters < used) {
        earlier += add_up<kCounters / kWarp>(sums);
        sums += kCounters / kWarp * (first / (kTogether * kCounters) % 2 == 0 ? 1 : -1);
      }
    }
  }
  /// How many marked positions there are before this one.
  __device__ std::int32_t rank(std::int32_t position) const {
    const auto place = static_cast<std::uint32_t>(position);
    const std::uint32_t group = place / kGroupBits;
    const uint2 marks = reinterpret_cast<const uint2*>(groups)[group];
    const bool high = (place & 32U) != 0U;
    const std::uint32_t lower = (1U << place % 32U) - 1U;
    return before[group] + (high ? __popc(marks.x) : 0) + __popc((high ? marks.y : marks.x) & lower);
  }
};
static_assert(2 * kCounters / kWarp <= kWarp);

/// Shared memory of a search in a list.
struct ListSearch {
  std::uint64_t few[kFew];
  std::uint64_t found;
  std::int32_t few_count;  ///< zero before
};

/// Marks the `wanted` largest of the few entries, of which there are some, and finds the last of them: a warp takes an
/// entry.
__device__ inline void mark_few(std::int32_t wanted, const Bitmap& bitmap, ListSearch& search) {
  const std::int32_t count = min(search.few_count, kFew);
#pragma unroll 1
  for (std::int32_t i = warp_index(); i < count; i += kListWarps) {
    const std::uint64_t entry = search.few[i];
    std::int32_t larger = 0;
    std::int32_t j = lane_index();
#pragma unroll 1
    do {
      larger += __popc(__ballot_sync(kAllLanes, j < count && search.few[j] > entry));
      j += kWarp;
    } while (j - lane_index() < count);
    if (lane_index() == 0 && larger < wanted) {
      bitmap.mark(position_in(entry));
      if (larger == wanted - 1) {
        search.found = entry;
      }
    }
  }
}

/// Marks the k largest entries and returns the k-th; both complete for all threads. The histogram is clear, for all
/// threads; 1 <= k <= count.
__device__ inline std::uint64_t mark_largest(const List& list, std::int32_t k, std::uint32_t bound,
                                             const Bitmap& bitmap, ListSearch& search, Scan& scan,
                                             std::int32_t* histogram) {
  Digit digit{.value = 0, .wanted = k, .count = 0};
  Range range{static_cast<std::uint64_t>(bound) << 32, 0};
  for (bool coarse = true;; coarse = false) {
    const int shift = max(0, range.bits - kDigitBits);
    list.for_each([&](std::uint64_t entry) {
      const std::uint64_t distance = entry - range.first;
      if (coarse) {
        atomicAdd(histogram + coarse_bin(key_of(distance)), 1);
      } else if (distance >> range.bits == 0U) {
        atomicAdd(histogram + (distance >> shift), 1);
      }
    });
    __syncthreads();
    digit = find_digit<kListThreads>(histogram, digit.wanted, scan);
    range = coarse ? coarse_range(digit.value, bound)
                   : Range{range.first + (static_cast<std::uint64_t>(digit.value) << shift), shift};
    if (digit.count <= kFew || range.bits == 0) {
      break;
    }
    clear<kListThreads>(histogram);
    __syncthreads();
  }
  // The last bin may reach beyond the largest key.
  const std::uint64_t last = range.first + min((std::uint64_t{1} << range.bits) - 1U, ~range.first);
  list.for_each([&](std::uint64_t entry) {
    if (entry > last) {
      bitmap.mark(position_in(entry));
    } else if (entry >= range.first) {
      const std::int32_t at = atomicAdd(&search.few_count, 1);
      if (at < kFew) {
        search.few[at] = entry;
      }
    }
  });
  __syncthreads();
  mark_few(digit.wanted, bitmap, search);
  __syncthreads();
  return search.found;
}

/// Writes the positions of the entries from `least` on, all of which are marked, in order. `sorted`: shared memory for
/// k.
__device__ inline void write_marked(const List& list, std::uint64_t least, const Bitmap& bitmap, std::int32_t length,
                                    std::int32_t k, std::int32_t* sums, std::int32_t* sorted, std::int32_t* selection) {
  if (threadIdx.x < kCounters) {
    bitmap.count_before(length, sums);
  }
  __syncthreads();
  list.for_each([&](std::uint64_t entry) {
    if (entry >= least) {
      sorted[bitmap.rank(position_in(entry))] = position_in(entry);
    }
  });
  __syncthreads();
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < k; i += kListThreads) {
    selection[i] = sorted[i];
  }
}

}  // namespace echo::top_k
