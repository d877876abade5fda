// release: host rows lose their slots. Sixteen rows per thread, whose loads and exchanges go out together; most rows
// have no slot and cost one coalesced load. Whoever exchanges the map's entry for "none" owns the slot and frees it, so
// runs may overlap; a warp puts its slots on the stack with one addition. Nothing else works on the maps meanwhile. No
// data moves. Cost: 100K rows in 61 layers, of which 4,096 have slots in each, take 10 us on an H200.
#include "cache_manager/release.cuh"

#include <algorithm>

#include "cache_manager/residency.cuh"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = kReleasedAtOnce / kThreads;

/// Runs that one launch takes, as its parameter: a copy of them to the device would take longer than the kernel.
struct Runs {
  static constexpr std::size_t kMost = 480;
  RowRun of[kMost];
};

__global__ __launch_bounds__(kThreads) void release_runs(const LayerView* layers, const __grid_constant__ Runs runs) {
  const LayerView layer = layers[blockIdx.y];
  const RowRun run = runs.of[blockIdx.x];
  for (std::int32_t done = 0; done < run.count; done += kPerThread * kThreads) {
    const std::int32_t first = done + static_cast<std::int32_t>(threadIdx.x);
    std::int32_t* words = layer.slot_of + run.first + first;
    std::int32_t slots[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      slots[i] = first + i * kThreads < run.count ? words[i * kThreads] : kNone;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (slots[i] != kNone) {
        slots[i] = atomicExch(words + i * kThreads, kNone);
      }
    }
    std::int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      own += slots[i] >= 0 ? 1 : 0;
    }
    const std::int32_t up_to = inclusive_warp_sum(own);
    std::int32_t place = 0;
    if (lane_index() == kWarp - 1 && up_to > 0) {
      place = atomicAdd(&layer.replacement->free, up_to);
    }
    place = __shfl_sync(kAllLanes, place, kWarp - 1) + up_to - own;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (slots[i] >= 0) {
        layer.host_of[slots[i]] = kNone;
        layer.stamp[slots[i]] = kFree;
        layer.free_slots[place++] = slots[i];
      }
    }
  }
}

}  // namespace

void launch_release(const LayerView* layers, std::int32_t layer_count, std::span<const RowRun> runs,
                    const LaunchContext& context) {
  while (!runs.empty()) {
    const std::span<const RowRun> now = runs.first(std::min(runs.size(), Runs::kMost));
    runs = runs.subspan(now.size());
    Runs parameter{};
    std::ranges::copy(now, parameter.of);
    const dim3 grid(static_cast<unsigned>(now.size()), static_cast<unsigned>(layer_count));
    launch(context, release_runs, grid, kThreads, 0, layers, parameter);
  }
}

}  // namespace echo
