#pragma once
// The top-k of a list of scored tokens, in any order, by a block.
//
// An entry is the ordered key above the complement of the position: entries are distinct, and the larger of two is the
// one that is selected, ties included. All keys are at or above a bound. Threads hold the first entries in registers;
// what does not fit there is in shared memory. Entries are counted in bins that are the wider the further above the
// bound they lie, 64 for each power of two; a bin that holds the k-th and many others is divided further. Few entries
// are compared with each other. What is selected is marked in a bitmap over the row's positions, and written from it.
// Cost: two rounds over the list by one multiprocessor, two over the bitmap, two prefix sums, six barriers.

#include "kernels/select_passes.cuh"

namespace echo::top_k {

inline constexpr int kListThreads = 1024;
inline constexpr int kListWarps = kListThreads / kWarp;
inline constexpr int kFew = 128;
inline constexpr std::int32_t kGroupBits = 64;  ///< positions that are counted together

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

/// A list: entry i < kHeld * kListThreads is held by thread i % kListThreads, the others lie in shared memory.
struct List {
  static constexpr std::int32_t kHeld = 4096 / kListThreads;

  std::uint64_t held[kHeld];     ///< 0, which is no entry, behind the end
  const std::uint64_t* entries;  ///< [count], of which those that are held are not looked at
  std::int32_t count;

  /// Holds the first of the entries.
  __device__ void hold() {
#pragma unroll
    for (std::int32_t i = 0; i < kHeld; ++i) {
      const std::int32_t at = index_of(i);
      held[i] = at < count ? entries[at] : 0U;
    }
  }
  /// Calls visit(entry) for all entries.
  template <typename Visit>
  __device__ void for_each(Visit visit) const {
#pragma unroll
    for (std::int32_t i = 0; i < kHeld; ++i) {
      if (index_of(i) < count) {
        visit(held[i]);
      }
    }
#pragma unroll 1
    for (std::int32_t at = index_of(kHeld); at < count; at += kListThreads) {
      visit(entries[at]);
    }
  }
  /// Calls see(entry) for all entries, and for 0, and then act(entry) for those, a few, of which that was true: no
  /// branch for each.
  template <typename See, typename Act>
  __device__ void for_few(See see, Act act) const {
    std::uint32_t few = 0;
#pragma unroll
    for (std::int32_t i = 0; i < kHeld; ++i) {
      few |= see(held[i]) ? 1U << i : 0U;
    }
#pragma unroll 1
    for (; few != 0U; few &= few - 1U) {
      std::uint64_t entry = 0;
#pragma unroll
      for (std::int32_t i = 0; i < kHeld; ++i) {
        entry = (few & (0U - few)) == 1U << i ? held[i] : entry;
      }
      act(entry);
    }
#pragma unroll 1
    for (std::int32_t at = index_of(kHeld); at < count; at += kListThreads) {
      if (see(entries[at])) {
        act(entries[at]);
      }
    }
  }
  /// Index of a thread's i-th entry.
  __device__ static std::int32_t index_of(std::int32_t i) {
    return static_cast<std::int32_t>(threadIdx.x) + i * kListThreads;
  }
};

/// Positions of a row as bits, in shared memory.
struct Bitmap {
  std::uint64_t* groups;  ///< [count] kGroupBits positions each
  std::int32_t count;     ///< even

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
  /// Writes the marked positions below `length` in order, no more than k, once all is marked for all threads. A warp
  /// takes a part of them, a lane a group after the other. For `sums` see sum_before_warp.
  __device__ void write(std::int32_t length, std::int32_t k, std::int32_t* sums, std::int32_t* selection) const {
    const std::int32_t used = (length + kGroupBits - 1) / kGroupBits;
    const std::int32_t size = (used + kListThreads - 1) / kListThreads * kWarp;
    const std::int32_t end = min((warp_index() + 1) * size, used);
    std::int32_t own = 0;
#pragma unroll 1
    for (std::int32_t i = warp_index() * size + lane_index(); i < end; i += kWarp) {
      own += __popcll(groups[i]);
    }
    std::int32_t next = sum_before_warp(own, sums);
#pragma unroll 1
    for (std::int32_t first = warp_index() * size; first < end; first += 2 * kWarp) {
      std::uint64_t marks[2];
      std::uint32_t counts = 0;  // two in a word
#pragma unroll
      for (std::int32_t i = 0; i < 2; ++i) {
        const std::int32_t at = first + i * kWarp + lane_index();
        marks[i] = at < end ? groups[at] : 0U;
        counts |= static_cast<std::uint32_t>(__popcll(marks[i])) << (i * 16);
      }
      counts = inclusive_warp_sum(counts);
#pragma unroll
      for (std::int32_t i = 0; i < 2; ++i) {
        const auto up_to = static_cast<std::int32_t>(counts >> (i * 16) & 0xFFFFU);
        if (next + up_to <= k) {  // always, if no token is listed twice
          const std::int32_t position = (first + i * kWarp + lane_index()) * kGroupBits;
          std::int32_t* to = selection + next + up_to;
          to = write_word(static_cast<std::uint32_t>(marks[i] >> 32), position + 32, to);
          write_word(static_cast<std::uint32_t>(marks[i]), position, to);
        }
        next += __shfl_sync(kAllLanes, up_to, kWarp - 1);
      }
    }
  }

 private:
  /// Writes the marks of 32 positions from `first` on to the places before `to`, from the last one on: to find the
  /// highest bit takes one instruction. Returns its place.
  __device__ static std::int32_t* write_word(std::uint32_t marks, std::int32_t first, std::int32_t* to) {
#pragma unroll 1
    while (marks != 0U) {
      const int bit = 31 - __clz(static_cast<int>(marks));
      marks ^= 1U << bit;
      *--to = first + bit;
    }
    return to;
  }
};
static_assert(kWarp * kGroupBits < 1 << 16);

/// Shared memory of a search in a list.
struct ListSearch {
  std::uint64_t few[kFew];
  std::uint64_t found;
  std::int32_t few_count;  ///< zero before
};

/// Marks the `wanted` largest of the few entries and finds the last of them: a warp takes an entry.
__device__ inline void mark_few(std::int32_t wanted, const Bitmap& bitmap, ListSearch& search) {
  const std::int32_t count = min(search.few_count, kFew);
#pragma unroll 1
  for (std::int32_t i = warp_index(); i < count; i += kListWarps) {
    const std::uint64_t entry = search.few[i];
    std::int32_t larger = 0;
#pragma unroll 1
    for (std::int32_t first = 0; first < count; first += kWarp) {
      const std::int32_t j = first + lane_index();
      larger += __popc(__ballot_sync(kAllLanes, j < count && search.few[j] > entry));
    }
    if (lane_index() == 0 && larger < wanted) {
      bitmap.mark(position_in(entry));
      if (larger == wanted - 1) {
        search.found = entry;
      }
    }
  }
}

/// Marks the k largest entries and returns the k-th, complete for all threads. The histogram is clear, for all threads;
/// 1 <= k <= count.
__device__ inline std::uint64_t mark_largest(const List& list, std::int32_t k, std::uint32_t bound,
                                             const Bitmap& bitmap, ListSearch& search, Scan& scan,
                                             std::int32_t* histogram) {
  list.for_each([&](std::uint64_t entry) { atomicAdd(histogram + coarse_bin(key_of(entry) - bound), 1); });
  __syncthreads();
  Digit digit = find_digit<kListThreads>(histogram, k, scan);
  Range range = coarse_range(digit.value, bound);
  while (digit.count > kFew && range.bits > 0) {
    const int shift = max(0, range.bits - kDigitBits);
    clear<kListThreads>(histogram);
    __syncthreads();
    list.for_each([&](std::uint64_t entry) {
      const std::uint64_t distance = entry - range.first;
      if (distance >> range.bits == 0U) {
        atomicAdd(histogram + (distance >> shift), 1);
      }
    });
    __syncthreads();
    digit = find_digit<kListThreads>(histogram, digit.wanted, scan);
    range = {range.first + (static_cast<std::uint64_t>(digit.value) << shift), shift};
  }
  const std::uint64_t first = max(range.first, std::uint64_t{1});
  const std::uint64_t last = range.first + ((std::uint64_t{1} << range.bits) - 1U);
  const auto mark_larger = [&](std::uint64_t entry) {
    if (entry > last) {
      bitmap.mark(position_in(entry));
    }
    return entry >= first && entry <= last;
  };
  const auto add_to_few = [&](std::uint64_t entry) {
    const std::int32_t at = atomicAdd(&search.few_count, 1);
    if (at < kFew) {
      search.few[at] = entry;
    }
  };
  list.for_few(mark_larger, add_to_few);
  __syncthreads();
  mark_few(digit.wanted, bitmap, search);
  __syncthreads();
  return search.found;
}

}  // namespace echo::top_k
