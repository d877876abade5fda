#pragma once
// The top-k of a list of scored tokens in shared memory, in any order, by a block.
//
// An entry is the ordered key above the complement of the position: entries are distinct, and the larger of two is the
// one that is selected, ties included. All keys are at or above a bound. Entries are counted in bins that are the
// wider the further above the bound they lie, 64 for each power of two; a bin that holds the k-th and many others is
// divided further. Few entries are compared with each other. What is selected is marked in a bitmap over the row's
// positions; the marks before an entry's own are its place in the selection.
// Cost: three rounds over the list by one multiprocessor, each bound by the banks of shared memory that entries meet
// in; two prefix sums; seven barriers.

#include "kernels/select_passes.cuh"

namespace echo::top_k {

inline constexpr int kListThreads = 512;
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

/// Calls visit(entry) for all entries of a list, four of a thread at a time.
template <typename Visit>
__device__ inline void for_each_entry(const std::uint64_t* list, std::int32_t count, Visit visit) {
  constexpr std::int32_t kTogether = 4;
#pragma unroll 1
  for (auto first = static_cast<std::int32_t>(threadIdx.x); first < count; first += kTogether * kListThreads) {
    std::uint64_t entries[kTogether];
#pragma unroll
    for (std::int32_t i = 0; i < kTogether; ++i) {
      const std::int32_t at = first + i * kListThreads;
      entries[i] = at < count ? list[at] : 0U;
    }
#pragma unroll
    for (std::int32_t i = 0; i < kTogether; ++i) {
      if (first + i * kListThreads < count) {
        visit(entries[i]);
      }
    }
  }
}

/// Positions of a row as bits, in shared memory.
struct Bitmap {
  static constexpr std::int32_t kOwn = 4;  ///< groups that a thread takes at a time

  std::uint64_t* groups;  ///< [count] 64 positions each
  std::uint16_t* before;  ///< [count] marked positions of the groups before
  std::int32_t count;     ///< a multiple of kOwn

  __device__ void clear() const {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count / 2; i += kListThreads) {
      reinterpret_cast<uint4*>(groups)[i] = uint4{0U, 0U, 0U, 0U};
    }
  }
  __device__ void mark(std::int32_t position) const {
    atomicOr(reinterpret_cast<std::uint32_t*>(groups) + position / 32, 1U << (position % 32));
  }
  /// Marked positions before this one.
  __device__ std::int32_t rank(std::int32_t position) const {
    const std::int32_t i = position / kGroupBits;
    return before[i] + __popcll(groups[i] & ((std::uint64_t{1} << (position % kGroupBits)) - 1U));
  }
  /// Fills `before`, once all is marked; complete for all threads. For `sums` see sum_before.
  __device__ void count_marks(std::int32_t* sums) const {
    const std::int32_t per_thread = (count / kOwn + kListThreads - 1) / kListThreads * kOwn;
    const std::int32_t first = static_cast<std::int32_t>(threadIdx.x) * per_thread;
    std::int32_t own = 0;
    for (std::int32_t i = first; i < min(first + per_thread, count); i += kOwn) {
      const Marks marks(groups + i);
      own += marks.before_fourth + marks.fourth;
    }
    std::int32_t next = sum_before<kListThreads>(own, sums);
    for (std::int32_t i = first; i < min(first + per_thread, count); i += kOwn) {
      const Marks marks(groups + i);
      *reinterpret_cast<ushort4*>(before + i) =
          ushort4{static_cast<std::uint16_t>(next), static_cast<std::uint16_t>(next + marks.before_second),
                  static_cast<std::uint16_t>(next + marks.before_third),
                  static_cast<std::uint16_t>(next + marks.before_fourth)};
      next += marks.before_fourth + marks.fourth;
    }
    __syncthreads();
  }

 private:
  /// Of four groups.
  struct Marks {
    std::int32_t before_second;
    std::int32_t before_third;
    std::int32_t before_fourth;
    std::int32_t fourth;

    __device__ explicit Marks(const std::uint64_t* four) {
      const uint4 low = reinterpret_cast<const uint4*>(four)[0];
      const uint4 high = reinterpret_cast<const uint4*>(four)[1];
      before_second = __popc(low.x) + __popc(low.y);
      before_third = before_second + __popc(low.z) + __popc(low.w);
      before_fourth = before_third + __popc(high.x) + __popc(high.y);
      fourth = __popc(high.z) + __popc(high.w);
    }
  };
};

/// Shared memory of a search in a list.
struct ListSearch {
  std::uint64_t few[kFew];
  std::uint64_t found;
  std::int32_t few_count;  ///< zero before
};

/// Counts the list's entries by coarse bins, in a histogram that is clear.
__device__ inline void count_list(const std::uint64_t* list, std::int32_t count, std::uint32_t bound,
                                  std::int32_t* histogram) {
  for_each_entry(list, count,
                 [&](std::uint64_t entry) { atomicAdd(histogram + coarse_bin(key_of(entry) - bound), 1); });
}

/// Marks the `wanted` largest of the few entries and finds the last of them: a warp takes an entry.
__device__ inline void mark_few(std::int32_t wanted, const Bitmap& bitmap, ListSearch& search) {
  const std::int32_t count = min(search.few_count, kFew);
  for (std::int32_t i = warp_index(); i < count; i += kListWarps) {
    const std::uint64_t entry = search.few[i];
    std::int32_t larger = 0;
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

/// Marks the k largest entries and returns the k-th, complete for all threads. The histogram is that of count_list;
/// 1 <= k <= count.
__device__ inline std::uint64_t mark_largest(const std::uint64_t* list, std::int32_t count, std::int32_t k,
                                             std::uint32_t bound, const Bitmap& bitmap, ListSearch& search, Scan& scan,
                                             std::int32_t* histogram) {
  Digit digit = find_digit<kListThreads>(histogram, k, scan);
  Range range = coarse_range(digit.value, bound);
  while (digit.count > kFew && range.bits > 0) {
    const int shift = max(0, range.bits - kDigitBits);
    clear<kListThreads>(histogram);
    __syncthreads();
    for_each_entry(list, count, [&](std::uint64_t entry) {
      const std::uint64_t distance = entry - range.first;
      if (distance >> range.bits == 0U) {
        atomicAdd(histogram + (distance >> shift), 1);
      }
    });
    __syncthreads();
    digit = find_digit<kListThreads>(histogram, digit.wanted, scan);
    range = {range.first + (static_cast<std::uint64_t>(digit.value) << shift), shift};
  }
  const std::uint64_t last = range.first + ((std::uint64_t{1} << range.bits) - 1U);
  for_each_entry(list, count, [&](std::uint64_t entry) {
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

/// Writes the marked positions in order: those of the k entries from `least` on. `sorted` has room for k.
__device__ inline void write_in_order(const std::uint64_t* list, std::int32_t count, std::uint64_t least,
                                      std::int32_t k, const Bitmap& bitmap, std::int32_t* sums, std::int32_t* sorted,
                                      std::int32_t* selection) {
  bitmap.count_marks(sums);
  for_each_entry(list, count, [&](std::uint64_t entry) {
    if (entry >= least) {
      const std::int32_t position = position_in(entry);
      const std::int32_t rank = bitmap.rank(position);
      if (rank < k) {  // always, if no token is listed twice
        sorted[rank] = position;
      }
    }
  });
  __syncthreads();
  for (auto j = static_cast<std::int32_t>(threadIdx.x); j < k; j += kListThreads) {
    selection[j] = sorted[j];
  }
}

}  // namespace echo::top_k
