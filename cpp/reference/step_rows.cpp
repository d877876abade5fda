#include "reference/step_rows.hpp"

#include <string>

#include "echo/errors.hpp"

namespace echo {

std::int32_t table_capacity(const StepView& step) { return step.table_stride * kTokensPerBlock; }

std::int32_t position_of(const StepView& step, std::int32_t row) {
  const std::int32_t position = step.positions[row];
  if (position != kNone && (position < 0 || position >= table_capacity(step))) {
    throw StateError("positions: row " + std::to_string(row) + " is at " + std::to_string(position) +
                     ", its block table holds " + std::to_string(table_capacity(step)) + " tokens");
  }
  return position;
}

const std::int32_t* block_table_of(const StepView& step, std::int32_t row) {
  return step.block_table + static_cast<std::int64_t>(row / step.query_rows) * step.table_stride;
}

std::int32_t host_block_of(const LayerView& layer, const StepView& step, std::int32_t row, std::int32_t position) {
  const std::int32_t block = block_table_of(step, row)[position / kTokensPerBlock];
  if (block < 0 || block >= layer.host_rows / kTokensPerBlock) {
    throw StateError("block_table: row " + std::to_string(row) + " has block " + std::to_string(block) +
                     " at position " + std::to_string(position) + ", the host pool has " +
                     std::to_string(layer.host_rows / kTokensPerBlock));
  }
  return block;
}

std::int32_t host_row_of(const LayerView& layer, const StepView& step, std::int32_t row, std::int32_t position) {
  host_block_of(layer, step, row, position);
  return host_row(block_table_of(step, row), position);
}

}  // namespace echo
