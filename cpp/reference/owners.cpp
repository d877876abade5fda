#include "reference/owners.hpp"

#include <algorithm>

#include "reference/step_rows.hpp"

namespace echo {

void note_owners(const BeginParams& params) {
  const StepView& step = params.step;
  for (std::int32_t entry = 0; entry < step.rows / step.query_rows; ++entry) {
    const std::int32_t first = entry * step.query_rows;
    std::int32_t last = kNone;
    for (std::int32_t row = first; row < first + step.query_rows; ++row) {
      last = std::max(last, position_of(step, row));
    }
    const std::int32_t blocks = last == kNone ? 0 : last / kTokensPerBlock + 1;
    const std::int32_t* table = block_table_of(step, first);
    for (std::int32_t index = 0; index < blocks; ++index) {
      if (const std::int32_t block = table[index]; block >= 0 && block < params.host_blocks) {
        step.owners[block] = {.entry = entry, .index = index};
      }
    }
  }
}

}  // namespace echo
