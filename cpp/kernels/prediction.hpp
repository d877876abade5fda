#pragma once
// What the k-th scores of a session's steps in a layer say about the next one; shared by CPU and GPU code, to the bit.
//
// A moving average of them, and one of how far each was from the average before it: Jacobson's estimator of round-trip
// times in TCP (Congestion Avoidance and Control, 1988). Tokens at or above average - kMargin x deviation are listed,
// those at or above the average are worth fetching. Measured on generated traces (evidence.md), where one step in 30
// then finds fewer than k or too many, and lists hold 1.2 to 1.6 k.

#include <cmath>
#include <cstdint>

#include "kernels/number_formats.hpp"

namespace echo {

inline constexpr float kDeviationAlpha = 0.875F;  ///< weight of the past in the average of deviations
inline constexpr float kMargin = 2.5F;            ///< in deviations

/// Rounded before anything is added to it, on a GPU, too.
ECHO_HOST_DEVICE float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

ECHO_HOST_DEVICE float moved_average(float average, float value, float alpha) {
  return rounded_product(alpha, average) + rounded_product(1.0F - alpha, value);
}

/// Takes one more k-th score into account; NaN stands for what is unknown. One that is not finite is skipped, since an
/// average would never forget it.
ECHO_HOST_DEVICE void observe(float kth_score, float alpha, float& threshold, float& deviation) {
  if ((bits_of(kth_score) & kFloatInf) == kFloatInf) {
    return;
  }
  if (threshold != threshold) {
    threshold = kth_score;
    return;
  }
  const float error = fabsf(kth_score - threshold);
  deviation = deviation != deviation ? error : moved_average(deviation, error, kDeviationAlpha);
  if ((bits_of(deviation) & kFloatInf) == kFloatInf) {
    deviation = float_of(kFloatNan);
  }
  threshold = moved_average(threshold, kth_score, alpha);
}

/// The lowest score that is listed, and the lowest that is prefetched; NaN: none is.
struct SiftBounds {
  float candidates;
  float prefetch;
};

/// None where anything is unknown, or not finite.
ECHO_HOST_DEVICE SiftBounds sift_bounds(float threshold, float deviation) {
  const float candidates = threshold - rounded_product(kMargin, deviation);
  const bool known = deviation >= 0.0F && (bits_of(candidates) & kFloatInf) != kFloatInf;
  const float none = float_of(kFloatNan);
  return {known ? candidates : none, known ? threshold : none};
}

}  // namespace echo
