#pragma once
// Rows of a pass as kernels read them, checked: what lies outside the cache is reported and left
// out.

#include <cstdint>

#include "kernels/kernel_errors.hpp"
#include "kernels/params.hpp"

namespace echo {

/// A position as loaded from step.positions; kNone if it is padding or beyond its block table.
__device__ inline std::int32_t checked_position(const StepView& step, std::int32_t position,
                                                const KernelErrorView& errors) {
  if (position == kNone) {
    return kNone;
  }
  if (position < 0 || position >= static_cast<std::int64_t>(step.table_stride) * kTokensPerBlock) {
    errors.raise(KernelError::bad_position);
    return kNone;
  }
  return position;
}

/// Position of a row, kNone if it is padding or beyond its block table.
__device__ inline std::int32_t position_of(const StepView& step, std::int32_t row, const KernelErrorView& errors) {
  return checked_position(step, step.positions[row], errors);
}

__device__ inline const std::int32_t* block_table_of(const StepView& step, std::int32_t row) {
  return step.block_table + static_cast<std::int64_t>(row / step.query_rows) * step.table_stride;
}

/// Host row of a position of the row's session, kNone if its block is none of the layer's.
__device__ inline std::int32_t host_row_of(const LayerView& layer, const StepView& step, std::int32_t row,
                                           std::int32_t position, const KernelErrorView& errors) {
  const std::int32_t* table = block_table_of(step, row);
  const std::int32_t block = table[position / kTokensPerBlock];
  if (block < 0 || block >= layer.host_rows / kTokensPerBlock) {
    errors.raise(KernelError::bad_position);
    return kNone;
  }
  return host_row(table, position);
}

/// Host row that the new token of a row is written to, kNone for padding.
__device__ inline std::int32_t new_host_row(const LayerView& layer, const StepView& step, std::int32_t row,
                                            const KernelErrorView& errors) {
  const std::int32_t position = position_of(step, row, errors);
  return position == kNone ? kNone : host_row_of(layer, step, row, position, errors);
}

}  // namespace echo
