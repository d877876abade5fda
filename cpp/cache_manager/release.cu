// release: host rows lose their slots. A thread per row; most rows have no slot and cost one coalesced load. Whoever
// exchanges the map's entry for "none" owns the slot and frees it, so runs may overlap. Nothing else works on the
// maps meanwhile. No data moves.
#include "cache_manager/release.cuh"
#include "cache_manager/residency.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void release_runs(const LayerView* layers, const RowRun* runs) {
  const LayerView layer = layers[blockIdx.y];
  const RowRun run = runs[blockIdx.x];
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < run.count; i += kThreads) {
    if (layer.slot_of[run.first + i] != kNone) {
      release_row(layer, run.first + i);
    }
  }
}

}  // namespace

void launch_release(const LayerView* layers, std::int32_t layer_count, const RowRun* runs, std::int32_t run_count,
                    const LaunchContext& context) {
  const dim3 grid(static_cast<unsigned>(run_count), static_cast<unsigned>(layer_count));
  launch(context, release_runs, grid, kThreads, 0, layers, runs);
}

}  // namespace echo
