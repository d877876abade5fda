#pragma once
// The rule of sifting (RowSift in params.hpp): which scores are the sample, how it is counted, and what bounds follow.
// Shared by CPU and GPU code.
//
// The predicted k-th score only says where to look: bins of 1/64 of a power of two lie around it. The bounds come from
// the sample of this very step: where its scores reach the rank that the k-th of all scores should have in it, with a
// margin in standard deviations of that rank to either side. Candidates may be too many, so that margin is wide;
// what is prefetched in vain costs the link's time, what is not has to be recalled, so that one is narrow.

#include <cmath>
#include <cstdint>

#include "kernels/params.hpp"

namespace echo {

inline constexpr int kSiftShift = 17;                 ///< a bin is one value of the upper 15 bits of a key
inline constexpr std::uint32_t kNoKey = 0xFFFFFFFFU;  ///< above the key of any score
inline constexpr float kCandidateMargin = 3.0F;       ///< standard deviations of the k-th score's rank in the sample
inline constexpr float kPrefetchMargin = 1.0F;

/// Whether a block of keys is in the sample.
ECHO_HOST_DEVICE bool in_sample(std::int32_t key_block) { return key_block % kSampleEvery == 0; }

ECHO_HOST_DEVICE std::int32_t sift_bin(std::uint32_t key, std::uint32_t predicted) {
  const std::int32_t bin =
      static_cast<std::int32_t>(key >> kSiftShift) - static_cast<std::int32_t>(predicted >> kSiftShift) + kSiftBins / 2;
  return bin < 0 ? 0 : (bin < kSiftBins ? bin : kSiftBins - 1);
}

/// The lowest key of a bin, which must not be the first; kNoKey where there is none.
ECHO_HOST_DEVICE std::uint32_t sift_edge(std::int32_t bin, std::uint32_t predicted) {
  const std::int32_t top = static_cast<std::int32_t>(predicted >> kSiftShift) + bin - kSiftBins / 2;
  if (bin >= kSiftBins || top >> (32 - kSiftShift) > 0) {
    return kNoKey;
  }
  return top < 0 ? 0U : static_cast<std::uint32_t>(top) << kSiftShift;
}

/// How many scores of the sample lie above the two bounds, at least and at most.
struct SiftRanks {
  std::int32_t candidates;
  std::int32_t prefetch;
};

/// Of a row with `visible` tokens, more than top_k.
ECHO_HOST_DEVICE SiftRanks sift_ranks(std::int32_t sampled, std::int32_t visible, std::int32_t top_k) {
  const float expected = static_cast<float>(top_k) * (static_cast<float>(sampled) / static_cast<float>(visible));
  const float deviation = sqrtf(expected);
  const auto most = static_cast<std::int32_t>(expected - kPrefetchMargin * deviation);
  return {static_cast<std::int32_t>(expected + kCandidateMargin * deviation) + 2, most < 1 ? 1 : most};
}

/// RowSift::bounds for a row whose sample is counted; 0 where the prediction was too high for any.
ECHO_HOST_DEVICE std::uint64_t sift_bounds(const std::int32_t* histogram, SiftRanks ranks, std::uint32_t predicted) {
  std::int32_t bin = kSiftBins;
  std::int32_t above = 0;
  while (bin > 1 && above + histogram[bin - 1] <= ranks.prefetch) {
    above += histogram[--bin];
  }
  const std::uint64_t prefetch = sift_edge(bin, predicted);
  while (bin > 1 && above < ranks.candidates) {
    above += histogram[--bin];
  }
  return above < ranks.candidates ? 0U : (prefetch << 32) | sift_edge(bin, predicted);
}

}  // namespace echo
