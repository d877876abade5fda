// check: what recall left behind. Entries of the selections and host rows, a thread each; slots, a warp each, which
// compares the row's bytes with what the slabs were filled with, or with the slab itself where recall wrote it.
#include "check.hpp"

#include "bench_case.hpp"
#include "hashes.hpp"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace echo::bench {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 64;  ///< per layer

__device__ std::int64_t thread_of_layer() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

/// Whether the maps agree that the slot holds the row.
__device__ bool holds(const LayerView& layer, std::int32_t slot, std::int32_t row) {
  return slot >= 0 && slot < layer.slots && row >= 0 && row < layer.host_rows && layer.host_of[slot] == row &&
         layer.slot_of[row] == slot;
}

__global__ __launch_bounds__(kThreads) void check_entries(CheckParams p) {
  const LayerView layer = p.layers[blockIdx.y];
  const std::int64_t entries = static_cast<std::int64_t>(p.step.rows) * kTopK;
  unsigned long long wrong = 0;
  for (std::int64_t i = thread_of_layer(); i < entries; i += static_cast<std::int64_t>(kBlocks) * kThreads) {
    const std::int32_t position = p.selection[blockIdx.y * p.layer_entries + i];
    const std::int32_t slot = p.chosen_slots[blockIdx.y * p.layer_entries + i];
    const std::int32_t* table = p.step.block_table + i / kTopK * p.step.table_stride;
    const bool right = position == kNone ? slot == kNone : holds(layer, slot, host_row(table, position));
    wrong += right ? 0 : 1;
  }
  if (wrong != 0) {
    atomicAdd(&p.findings->wrong_entries, wrong);
  }
}

__global__ __launch_bounds__(kThreads) void check_host_rows(CheckParams p) {
  const LayerView layer = p.layers[blockIdx.y];
  unsigned long long wrong = 0;
  for (std::int64_t row = thread_of_layer(); row < p.host_rows; row += static_cast<std::int64_t>(kBlocks) * kThreads) {
    const std::int32_t slot = layer.slot_of[row];
    wrong += slot == kNone || holds(layer, slot, static_cast<std::int32_t>(row)) ? 0 : 1;
  }
  if (wrong != 0) {
    atomicAdd(&p.findings->wrong_maps, wrong);
  }
}

/// Whether this lane's words of a slot are those of the row.
__device__ bool same_bytes(const CheckParams& p, const LayerView& layer, std::int32_t slot, std::int32_t row) {
  const auto* found = reinterpret_cast<const std::uint32_t*>(row_address(layer.pool, slot, layer.row_bytes));
  const auto* in_slab = reinterpret_cast<const std::uint32_t*>(row_address(layer.slab, row, layer.host_stride));
  const bool appended = row % p.session_rows >= p.first_new;
  bool same = true;
  for (std::int32_t word = lane_index(); word < layer.row_bytes / 4; word += kWarp) {
    const std::uint32_t expected =
        appended ? in_slab[word] : row_word(static_cast<std::int32_t>(blockIdx.y), row, word, layer.row_bytes);
    same = same && found[word] == expected;
  }
  return same;
}

__global__ __launch_bounds__(kThreads) void check_slots(CheckParams p) {
  constexpr std::int32_t kWarps = kThreads / kWarp;
  const LayerView layer = p.layers[blockIdx.y];
  unsigned long long wrong_maps = 0;
  unsigned long long wrong_rows = 0;
  unsigned long long resident = 0;
  for (std::int32_t slot = static_cast<std::int32_t>(blockIdx.x) * kWarps + warp_index(); slot < p.slots;
       slot += kBlocks * kWarps) {
    const std::int32_t row = layer.host_of[slot];
    if (row == kNone) {
      wrong_maps += layer.stamp[slot] == kFree ? 0 : 1;
      continue;
    }
    ++resident;
    if (!holds(layer, slot, row)) {
      ++wrong_maps;
    } else if (p.bytes) {
      wrong_rows += __all_sync(kAllLanes, same_bytes(p, layer, slot, row) ? 1 : 0) != 0 ? 0 : 1;
    }
  }
  if (lane_index() == 0) {
    atomicAdd(&p.findings->resident, resident);
    if (wrong_maps + wrong_rows != 0) {
      atomicAdd(&p.findings->wrong_maps, wrong_maps);
      atomicAdd(&p.findings->wrong_rows, wrong_rows);
    }
  }
}

}  // namespace

void launch_check(const CheckParams& params, const LaunchContext& context) {
  const dim3 grid(kBlocks, static_cast<unsigned>(params.layer_count));
  launch(context, check_entries, grid, kThreads, 0, params);
  launch(context, check_host_rows, grid, kThreads, 0, params);
  launch(context, check_slots, grid, kThreads, 0, params);
}

}  // namespace echo::bench
