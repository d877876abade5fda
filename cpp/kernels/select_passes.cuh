#pragma once
// Passes of a block over a part of a row's scores, for the kernels that select: counting a digit of the ordered keys
// (number_formats.hpp), finding the digit in which the wanted key lies, counting and writing what is taken once the
// k-th key is known.
//
// A pass of digits takes warps through the part in turns; the last two give each warp a contiguous part of it, so that
// positions come out in order. Where most keys fall into one bin, a warp adds its share at once.

#include <cstdint>

#include "kernels/number_formats.hpp"
#include "kernels/warp.cuh"

namespace echo::top_k {

inline constexpr int kLoads = 8;  ///< scores of a lane in flight
inline constexpr int kPiece = kLoads * kWarp;
inline constexpr int kDigitBits = 11;
inline constexpr int kBins = 1 << kDigitBits;
inline constexpr int kFindersMeet = 1;  ///< hardware barriers
inline constexpr int kCountersMeet = 2;

/// Where the wanted key lies.
struct Digit {
  std::uint32_t value;
  std::int32_t wanted;  ///< of the keys with this digit, counted from the largest
  std::int32_t count;   ///< keys with this digit
};

/// Shared memory of a search.
struct alignas(16) Scan {
  std::int32_t sums[kWarp];
  Digit digit;
};

/// The k-th largest key and how many scores of just that key belong to the k largest.
struct Cut {
  std::uint32_t key;
  std::int32_t equal;
};

/// Positions [begin, end) of a row.
struct Part {
  std::int32_t begin;
  std::int32_t end;
};

/// How many keys are larger than, and equal to, that of the cut.
struct Counts {
  std::int32_t larger;
  std::int32_t equal;
};

/// Loads the keys of a piece of kPiece scores, a column per lane; false behind the end.
__device__ inline void load_keys(const float* scores, std::int32_t first, std::int32_t end,
                                 std::uint32_t (&keys)[kLoads], bool (&valid)[kLoads]) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const std::int32_t at = first + i * kWarp + lane_index();
    valid[i] = at < end;
    keys[i] = valid[i] ? ordered_key(scores[at]) : 0U;
  }
}

/// Counts a bin per lane. The lanes that share the first one's bin are added by one atomic operation.
__device__ inline void count(std::int32_t* histogram, std::uint32_t bin, bool counts) {
  const unsigned lanes = __ballot_sync(kAllLanes, counts);
  if (lanes == 0U) {
    return;
  }
  const int leader = __ffs(static_cast<int>(lanes)) - 1;
  const std::uint32_t shared_bin = __shfl_sync(kAllLanes, bin, leader);
  const bool same = counts && bin == shared_bin;
  const unsigned sharing = __ballot_sync(kAllLanes, same);
  if (lane_index() == leader) {
    atomicAdd(histogram + bin, __popc(sharing));
  } else if (counts && !same) {
    atomicAdd(histogram + bin, 1);
  }
}

template <int kThreads>
__device__ inline void clear(std::int32_t* histogram) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kBins / 4; i += kThreads) {
    reinterpret_cast<int4*>(histogram)[i] = int4{0, 0, 0, 0};
  }
}

/// Sum of what the warps before this one have in `sums`, shared memory for a number of each warp.
__device__ inline std::int32_t add_up_before(const std::int32_t* sums) {
  return static_cast<std::int32_t>(
      __reduce_add_sync(kAllLanes, lane_index() < warp_index() ? static_cast<unsigned>(sums[lane_index()]) : 0U));
}

/// Of all kWarps warps.
template <int kWarps>
__device__ inline std::int32_t add_up(const std::int32_t* sums) {
  return static_cast<std::int32_t>(
      __reduce_add_sync(kAllLanes, lane_index() < kWarps ? static_cast<unsigned>(sums[lane_index()]) : 0U));
}

/// Finds the bin, from the highest down, in which the `wanted`-th key lies. The histogram is aligned to 16 bytes,
/// complete for all threads, and free again after the call. No more than half of a block do it: more warps have more to
/// issue.
template <int kThreads>
__device__ inline Digit find_digit(const std::int32_t* histogram, std::int32_t wanted, Scan& scan) {
  constexpr int kFinders = kThreads < 512 ? kThreads : 512;
  constexpr int kOwn = kBins / kFinders;
  struct alignas(16) Own {
    std::int32_t bins[kOwn];
  };
  if (threadIdx.x < kFinders) {
    const int vector = kFinders - 1 - static_cast<int>(threadIdx.x);
    const Own own = reinterpret_cast<const Own*>(histogram)[vector];
    std::int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sum += own.bins[i];
    }
    const std::int32_t inclusive = inclusive_warp_sum(sum);
    if (lane_index() == kWarp - 1) {
      scan.sums[warp_index()] = inclusive;
    }
    meet(kFindersMeet, kFinders);
    std::int32_t above = inclusive - sum + add_up_before(scan.sums);
    if (above < wanted && wanted <= above + sum) {
      Digit digit{};
      bool found = false;
#pragma unroll
      for (int i = kOwn - 1; i >= 0; --i) {
        digit = found ? digit
                      : Digit{.value = static_cast<std::uint32_t>(vector * kOwn + i),
                              .wanted = wanted - above,
                              .count = own.bins[i]};
        above += own.bins[i];
        found = found || wanted <= above;
      }
      scan.digit = digit;
    }
  }
  __syncthreads();
  return scan.digit;
}

/// Counts the digit at `shift` of those keys whose bits of `mask` are those of `known`.
template <int kThreads>
__device__ inline void count_digits(const float* scores, Part part, std::uint32_t known, std::uint32_t mask, int shift,
                                    std::uint32_t digit_mask, std::int32_t* histogram) {
  constexpr int kWarps = kThreads / kWarp;
  for (std::int32_t first = part.begin + warp_index() * kPiece; first < part.end; first += kWarps * kPiece) {
    std::uint32_t keys[kLoads];
    bool valid[kLoads];
    load_keys(scores, first, part.end, keys, valid);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      count(histogram, (keys[i] >> shift) & digit_mask, valid[i] && (keys[i] & mask) == known);
    }
  }
}

/// The k-th largest key of a row, digit by digit: `merged(shift, digit_mask, known, mask)` returns the histogram of a
/// digit over the whole row, complete for all threads. Requires 1 <= k <= length.
template <int kThreads, typename Merged>
__device__ inline Cut find_cut(std::int32_t k, Scan& scan, Merged merged) {
  Cut cut{0U, k};
  std::uint32_t mask = 0U;
  for (int shift = 32; shift > 0;) {
    const int bits = min(kDigitBits, shift);
    shift -= bits;
    const std::uint32_t digit_mask = (1U << bits) - 1U;
    const Digit digit = find_digit<kThreads>(merged(shift, digit_mask, cut.key, mask), cut.equal, scan);
    cut.key |= digit.value << shift;
    cut.equal = digit.wanted;
    mask |= digit_mask << shift;
  }
  return cut;
}

/// The part of a part that this warp takes.
template <int kThreads>
__device__ inline Part part_of_warp(Part part) {
  constexpr int kWarps = kThreads / kWarp;
  const std::int32_t length = part.end - part.begin;
  const std::int32_t pieces = (length + kPiece - 1) / kPiece;
  const std::int32_t size = (pieces + kWarps - 1) / kWarps * kPiece;
  const auto before =
      static_cast<std::int32_t>(min(static_cast<std::int64_t>(warp_index()) * size, static_cast<std::int64_t>(length)));
  return {part.begin + before, part.begin + before + min(length - before, size)};
}

/// Counts keys of the part against one; returns what lies in the parts of the warps before, `total` becomes that of
/// all.
template <int kThreads>
__device__ inline Counts count_taken(const float* scores, Part part, std::uint32_t key, Counts& total,
                                     std::int32_t* sums) {
  const Part own = part_of_warp<kThreads>(part);
  std::uint32_t keys[kLoads];
  bool valid[kLoads];
  Counts counts{0, 0};
  for (std::int32_t first = own.begin; first < own.end; first += kPiece) {
    load_keys(scores, first, own.end, keys, valid);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      counts.larger += valid[i] && keys[i] > key ? 1 : 0;
      counts.equal += valid[i] && keys[i] == key ? 1 : 0;
    }
  }
  // The sum over all threads before the warp's first lane is the sum over all warps before it.
  counts.larger = __shfl_sync(kAllLanes, exclusive_sum<kThreads>(counts.larger, total.larger, sums), 0);
  counts.equal = __shfl_sync(kAllLanes, exclusive_sum<kThreads>(counts.equal, total.equal, sums), 0);
  return counts;
}

/// Writes the positions of all larger keys and of the first equal ones, in order. `before`: what lies before this
/// warp's part, of the whole row.
template <int kThreads>
__device__ inline void write_taken(const float* scores, Part part, Cut cut, Counts before, std::int32_t* selection) {
  const Part own = part_of_warp<kThreads>(part);
  std::int32_t equal = before.equal;
  std::int32_t next = before.larger + min(equal, cut.equal);
  std::uint32_t keys[kLoads];
  bool valid[kLoads];
  const unsigned lower_lanes = (1U << lane_index()) - 1U;
  for (std::int32_t first = own.begin; first < own.end; first += kPiece) {
    load_keys(scores, first, own.end, keys, valid);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_equal = valid[i] && keys[i] == cut.key;
      const unsigned equals = __ballot_sync(kAllLanes, is_equal);
      const bool taken =
          (valid[i] && keys[i] > cut.key) || (is_equal && equal + __popc(equals & lower_lanes) < cut.equal);
      const unsigned takers = __ballot_sync(kAllLanes, taken);
      if (taken) {
        selection[next + __popc(takers & lower_lanes)] = first + i * kWarp + lane_index();
      }
      next += __popc(takers);
      equal += __popc(equals);
    }
  }
}

/// What a row of fewer than k tokens selects: all of them, then kNone.
template <int kThreads>
__device__ inline void write_all(std::int32_t length, std::int32_t k, std::int32_t* selection) {
  for (auto j = static_cast<std::int32_t>(threadIdx.x); j < k; j += kThreads) {
    selection[j] = j < length ? j : kNone;
  }
}

}  // namespace echo::top_k
