#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

inline constexpr std::int32_t kAttendRows = 32;  ///< query rows whose partial results are kept at once

/// Results of the splits of up to kAttendRows query rows, before they are put together.
struct AttendPartials {
  float* sums;     ///< [rows, splits, query_heads, latent] sum of exp(logit - maximum) * row
  float2* shares;  ///< [rows, splits, query_heads] maximum, sum of exp(logit - maximum)
};

/// Throws NotSupported where the shape is too large for the kernel on this device.
void check_attend(const ShapeView& shape, int device);

/// First launch: the splits of query rows [first, first + count) of the block.
void launch_attend_splits(const AttendParams& params, std::int32_t first, std::int32_t count,
                          const AttendPartials& partials, const LaunchContext& context);
/// Second launch: puts their splits together and writes the output.
void launch_attend_combine(const AttendParams& params, std::int32_t first, std::int32_t count,
                           const AttendPartials& partials, const LaunchContext& context);

}  // namespace echo
