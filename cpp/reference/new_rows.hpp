#pragma once

#include <cstdint>
#include <vector>

#include "kernels/params.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// A row of the pass that is no padding, and where its token's row lies on the host.
struct NewRow {
  std::int32_t row;
  std::int32_t host_row;
};

/// All of them, in order. Throws StateError if the step is malformed or two rows have one host row.
std::vector<NewRow> new_rows(const LayerView& layer, const StepView& step);

/// Gives them slots in each of the layers, in parallel: those that hints name, then by age alone, since
/// nothing is scored yet. Throws StateError if the step is malformed, or naming `gpu_slots` if they do not fit.
void claim_new_rows(ThreadPool& pool, const BeginParams& params);

/// Encodes `kv` (as in AppendParams) into the host rows, and copies those bytes to the slots of rows
/// that have one, so that the two cannot differ. Rows in parallel.
void write_rows(ThreadPool& pool, const LayerView& layer, const ShapeView& shape, const void* kv, DType kv_dtype,
                const std::vector<NewRow>& rows);

}  // namespace echo
