// release: host rows lose their slots. A thread per row; most rows have no slot and cost one
// coalesced load. Whoever exchanges the map's entry for "none" owns the slot and frees it, so runs
// may overlap. Nothing else works on the maps meanwhile. No data moves.
#include "cache_manager/release.cuh"
#include "kernels/launch.cuh"
#include "kernels/step_rows.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;

__device__ void release_row(const LayerView& layer, std::int32_t row) {
  if (layer.slot_of[row] == kNone) {
    return;
  }
  const std::int32_t slot = atomicExch(layer.slot_of + row, kNone);
  if (slot == kNone) {
    return;
  }
  const std::int32_t stamp = layer.stamp[slot];
  layer.host_of[slot] = kNone;
  layer.stamp[slot] = kFree;
  atomicSub(&layer.replacement->used, 1);
  if (in_window(stamp, layer.replacement->last_tick)) {
    atomicSub(layer.replacement->recent + stamp % kWindow, 1);
  }
}

__global__ __launch_bounds__(kThreads) void release_runs(const LayerView* layers, const RowRun* runs) {
  const LayerView layer = layers[blockIdx.y];
  const RowRun run = runs[blockIdx.x];
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < run.count; i += kThreads) {
    release_row(layer, run.first + i);
  }
}

__global__ __launch_bounds__(kThreads) void unmap_new(LayerView layer, StepView step, KernelErrorView errors) {
  const std::int32_t row = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (row < step.rows) {
    const std::int32_t target = new_host_row(layer, step, row, errors);
    if (target != kNone) {
      release_row(layer, target);
    }
  }
}

}  // namespace

void launch_release(const LayerView* layers, std::int32_t layer_count, const RowRun* runs, std::int32_t run_count,
                    const LaunchContext& context) {
  const dim3 grid(static_cast<unsigned>(run_count), static_cast<unsigned>(layer_count));
  launch(context, release_runs, grid, kThreads, 0, layers, runs);
}

void launch_unmap_new(const AppendParams& params, const LaunchContext& context) {
  launch(context, unmap_new, blocks_for(params.step.rows, kThreads), kThreads, 0, params.layer, params.step,
         context.errors);
}

}  // namespace echo
