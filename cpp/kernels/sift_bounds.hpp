#pragma once
// What a sample of a row's scores says about its k-th largest: the rules of sifting, shared by CPU and GPU code.
//
// Keys are counted in bins of their top 15 bits (sign, exponent, 6 bits of mantissa) around the predicted k-th key. Of
// every kSampleEvery-th key block `sampled` of `length` scores are counted, so the k best leave about
// x = k * sampled / length counts; the bound of candidates is the bin with x + 4 sqrt(x) + 2 counts from there on: of
// rows whose scores do not depend on their position one in 30,000 falls short of k candidates. Prefetch aims at k.

#include <cmath>
#include <cstdint>

#include "kernels/number_formats.hpp"
#include "kernels/params.hpp"

namespace echo {

inline constexpr int kSiftShift = 17;                 ///< bits of a key that its bin does not depend on
inline constexpr std::uint32_t kNoKey = 0xFFFFFFFFU;  ///< above all keys

/// Top bits of the keys in bin 0, may be negative.
ECHO_HOST_DEVICE std::int32_t first_bin(float predicted) {
  return static_cast<std::int32_t>(ordered_key(predicted) >> kSiftShift) - kSiftBins / 2;
}
ECHO_HOST_DEVICE std::int32_t bin_of(std::uint32_t key, std::int32_t first) {
  const std::int32_t bin = static_cast<std::int32_t>(key >> kSiftShift) - first;
  return bin < 0 ? 0 : (bin < kSiftBins ? bin : kSiftBins - 1);
}
/// The least key of a bin and those above; 0 if that is none.
ECHO_HOST_DEVICE std::uint32_t key_of_bin(std::int32_t bin, std::int32_t first) {
  const std::int32_t top = bin + first;
  return top <= 0 || top >= 1 << (32 - kSiftShift) ? 0U : static_cast<std::uint32_t>(top) << kSiftShift;
}

/// First key block of the sample of a row whose tokens lie in so many blocks: every kSampleEvery-th one, the last of
/// them half-way between the newest block and the one it would be next. The newest tokens are nearly all selected: a
/// sample with them says too much, one that ends far from them too little.
ECHO_HOST_DEVICE std::int32_t first_sampled(std::int32_t blocks) {
  const std::int32_t newest = blocks - 1;
  return (newest < kSampleEvery ? newest - newest / 2 : newest - kSampleEvery / 2) % kSampleEvery;
}

/// Scores of a row of `length` tokens that its sample has, where that begins with a key block.
ECHO_HOST_DEVICE std::int32_t sample_of(std::int32_t length, std::int32_t first) {
  const std::int32_t whole = length / kTokensPerBlock;
  const std::int32_t tail = whole % kSampleEvery == first ? length % kTokensPerBlock : 0;
  return (whole + kSampleEvery - 1 - first) / kSampleEvery * kTokensPerBlock + tail;
}

/// Counts from a bound on, at least.
struct SiftTargets {
  std::int32_t candidates;
  std::int32_t prefetch;
  std::int32_t most;  ///< and at most: more candidates would not fit
};
ECHO_HOST_DEVICE SiftTargets sift_targets(std::int32_t k, std::int32_t capacity, std::int32_t sampled,
                                          std::int32_t length) {
  const float share = static_cast<float>(sampled) / static_cast<float>(length);
  const float wanted = static_cast<float>(k) * share;
  return {static_cast<std::int32_t>(wanted + 4.0F * sqrtf(wanted) + 2.0F),
          static_cast<std::int32_t>(wanted + 0.5F * sqrtf(wanted) + 1.0F),
          static_cast<std::int32_t>(0.9F * static_cast<float>(capacity) * share)};
}

/// RowSift::bounds.
ECHO_HOST_DEVICE std::uint64_t pack_bounds(std::uint32_t candidates, std::uint32_t prefetch) {
  return static_cast<std::uint64_t>(prefetch) << 32 | candidates;
}

}  // namespace echo
