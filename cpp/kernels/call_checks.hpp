#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/params.hpp"

namespace echo {

// What the CUDA backend asks of its callers. InvalidArgument naming `what`, or `rows`.

void require_at_most(const char* what, std::int64_t value, std::int64_t most);
/// Of bytes that move in the pieces that kernels take.
void require_pieces(const char* what, std::int64_t bytes);
/// Runs cut so short that one thread block per run and layer makes good work.
std::vector<RowRun> short_runs(std::span<const RowRun> rows, std::int64_t host_rows);

}  // namespace echo
