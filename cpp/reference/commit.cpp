#include "reference/commit.hpp"

#include <algorithm>

#include "kernels/prediction.hpp"

namespace echo {

void commit_thresholds(const CommitParams& params) {
  for (std::int32_t layer = 0; layer < params.layers; ++layer) {
    float* scores = params.kth_score + layer * params.kth_stride;
    for (std::int32_t row = 0; row < params.step.rows; ++row) {
      const std::int32_t session = params.step.session[row];
      if (session == kNone) {
        continue;
      }
      const std::int64_t place = static_cast<std::int64_t>(session) * params.layers + layer;
      observe(scores[row], params.alpha, params.thresholds[place], params.deviations[place]);
    }
    std::fill_n(scores, params.kth_stride, float_of(kFloatNan));
  }
}

}  // namespace echo
