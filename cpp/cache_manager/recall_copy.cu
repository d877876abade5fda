// recall_copy: the bytes of missing rows, from host memory into their slots.
//
// A warp per row, 16 bytes per lane, up to four loads of a lane in flight before the first store.
// Misses are in order of host row, so neighbouring warps read neighbouring rows and share address
// translations. 32 blocks of 16 warps fill the link and leave most of the GPU to others. Then each
// entry's host row is replaced by its slot; the maps are final since the launch before. Cost: the
// link's, 19-47 GB/s for rows of 656 bytes (by how far apart they lie), and two dependent loads per
// entry.
#include "cache_manager/recall_copy.cuh"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kBlocks = 32;
constexpr int kThreads = 512;
constexpr int kLoads = 4;

/// Copies a row with one warp; 16-byte aligned at both ends.
__device__ void copy_row(const std::byte* from, std::byte* to, std::int32_t bytes) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const std::int32_t pieces = bytes / static_cast<std::int32_t>(sizeof(uint4));
  for (std::int32_t first = lane_index(); first < pieces; first += kLoads * kWarp) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * kWarp < pieces) {
        loaded[i] = source[first + i * kWarp];
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * kWarp < pieces) {
        target[first + i * kWarp] = loaded[i];
      }
    }
  }
}

__global__ __launch_bounds__(kThreads) void recall_copy(LayerView layer, std::int32_t* slots, std::int64_t entries,
                                                        ClaimView claim) {
  const std::int32_t missing = claim.state->missing;
  constexpr std::int32_t kWarps = kThreads / kWarp;
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x) * kWarps + warp_index(); i < missing;
       i += static_cast<std::int32_t>(gridDim.x) * kWarps) {
    const Miss miss = claim.misses[i];
    copy_row(row_address(layer.slab, miss.host_row, layer.host_stride),
             row_address(layer.pool, miss.slot, layer.row_bytes), layer.row_bytes);
  }
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t entry = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; entry < entries;
       entry += stride) {
    const std::int32_t row = slots[entry];
    slots[entry] = row == kNone ? kNone : layer.slot_of[row];
  }
}

}  // namespace

void launch_recall_copy(const RecallParams& params, const ClaimView& claim, const LaunchContext& context) {
  const std::int64_t entries = static_cast<std::int64_t>(params.block.count) * params.shape.top_k;
  if (entries != 0) {
    launch(context, recall_copy, kBlocks, kThreads, 0, params.layer, params.slots, entries, claim);
  }
}

}  // namespace echo
