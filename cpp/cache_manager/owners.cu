// owners: which batch entry a host block belongs to, the inverse of the block tables, once per pass for all layers.
//
// A thread per block of an entry. Nothing is cleared: whoever reads an entry checks it against the block table.
// Besides, each batch entry's thread blocks zero what the first score of the pass sifts into for the entry's rows.
// Cost: that of a launch; 20K blocks (13 sessions of 100K tokens) are 160 KB of scattered 8-byte stores.
#include <algorithm>

#include "cache_manager/owners.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;

/// Position of the last row of a batch entry that is no padding, kNone if there is none.
__device__ std::int32_t last_position(const StepView& step, std::int32_t entry) {
  std::int32_t position = kNone;
  for (std::int32_t row = step.query_rows; row > 0 && position == kNone; --row) {
    position = step.positions[entry * step.query_rows + row - 1];
  }
  return position;
}

__device__ void clear_sift(const BeginParams& p, std::int32_t entry) {
  const std::int32_t thread = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (p.sift_rows != nullptr) {
    auto* pieces = reinterpret_cast<uint4*>(p.sift_rows + entry * p.step.query_rows);
    const auto count = p.step.query_rows * static_cast<std::int32_t>(sizeof(RowSift) / sizeof(uint4));
    for (std::int32_t i = thread; i < count; i += static_cast<std::int32_t>(gridDim.x * kThreads)) {
      pieces[i] = make_uint4(0U, 0U, 0U, 0U);
    }
  }
  if (p.prefetched != nullptr && entry == 0 && thread == 0) {
    *p.prefetched = 0;
  }
}

__global__ __launch_bounds__(kThreads) void owners(BeginParams p) {
  const auto entry = static_cast<std::int32_t>(blockIdx.y);
  clear_sift(p, entry);
  const std::int32_t last = last_position(p.step, entry);
  const std::int32_t count = last < 0 ? 0 : min(last / kTokensPerBlock + 1, p.step.table_stride);
  const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(entry) * p.step.table_stride;
  for (std::int32_t index = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x); index < count;
       index += static_cast<std::int32_t>(gridDim.x * kThreads)) {
    const std::int32_t block = table[index];
    if (block >= 0 && block < p.host_blocks) {
      p.step.owners[block] = {entry, index};
    }
  }
}

}  // namespace

void launch_owners(const BeginParams& params, const LaunchContext& context) {
  constexpr unsigned kMostBlocks = 8;  // per entry
  const dim3 grid(std::min(kMostBlocks, blocks_for(params.step.table_stride, kThreads)),
                  static_cast<unsigned>(params.step.rows / params.step.query_rows));
  launch(context, owners, grid, kThreads, 0, params);
}

}  // namespace echo
