#include "reference/commit.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/number_formats.hpp"

namespace echo {

void commit_thresholds(const CommitParams& params) {
  for (std::int32_t layer = 0; layer < params.layers; ++layer) {
    float* scores = params.kth_score + layer * params.kth_stride;
    for (std::int32_t row = 0; row < params.step.rows; ++row) {
      const std::int32_t session = params.step.session[row];
      if (session == kNone || !std::isfinite(scores[row])) {
        continue;
      }
      float& threshold = params.thresholds[static_cast<std::int64_t>(session) * params.layers + layer];
      threshold = std::isnan(threshold) ? scores[row] : params.alpha * threshold + (1.0F - params.alpha) * scores[row];
    }
    std::fill_n(scores, params.kth_stride, float_of(kFloatNan));
  }
}

}  // namespace echo
