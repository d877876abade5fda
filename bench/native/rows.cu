// What fills memory before, and the gather that recall is compared with.
//
// gather: a warp per row, 16 bytes per lane, all loads of a row before its stores; rows go round the warps of the grid,
// so rows that follow each other in the list are on their way together. Cost: the link's.
#include "rows.hpp"

#include "bench_case.hpp"
#include "hashes.hpp"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace echo::bench {
namespace {

constexpr int kThreads = 512;
constexpr std::int32_t kPieceBytes = 16;
constexpr std::int32_t kPieceWords = 4;

__device__ std::int64_t thread_of_grid() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ std::int64_t threads_of_grid() { return static_cast<std::int64_t>(gridDim.x) * kThreads; }

__global__ __launch_bounds__(kThreads) void fill_slabs(std::byte* slabs, std::int32_t row_bytes,
                                                       std::int64_t host_rows) {
  const auto layer = static_cast<std::int32_t>(blockIdx.y);
  const std::int32_t row_pieces = row_bytes / kPieceBytes;
  auto* slab = reinterpret_cast<uint4*>(slabs + layer * host_rows * row_bytes);
  for (std::int64_t i = thread_of_grid(); i < host_rows * row_pieces; i += threads_of_grid()) {
    const auto row = static_cast<std::int32_t>(i / row_pieces);
    const auto word = static_cast<std::int32_t>(i % row_pieces) * kPieceWords;
    slab[i] = make_uint4(row_word(layer, row, word, row_bytes), row_word(layer, row, word + 1, row_bytes),
                         row_word(layer, row, word + 2, row_bytes), row_word(layer, row, word + 3, row_bytes));
  }
}

__global__ __launch_bounds__(kThreads) void fill_scores(float* scores, std::int64_t stride, float* kth_score,
                                                        StepView step, std::uint32_t seed) {
  const std::uint32_t key = hash(seed, blockIdx.y);
  const auto row = static_cast<std::int32_t>(blockIdx.y) % step.rows;
  const std::int32_t tokens = step.positions[row] + 1;
  for (std::int64_t i = thread_of_grid(); i < tokens; i += threads_of_grid()) {
    scores[blockIdx.y * stride + i] = unit_float(hash(key, static_cast<std::uint32_t>(i)));
  }
  if (thread_of_grid() == 0) {
    kth_score[row] = kKthScore;
  }
}

__global__ __launch_bounds__(kThreads) void fill_kv(std::uint16_t* kv, std::int32_t dims, StepView step) {
  const auto entry = static_cast<std::int32_t>(blockIdx.x);
  const auto layer = static_cast<std::int32_t>(blockIdx.y);
  const std::int64_t first = (static_cast<std::int64_t>(layer) * step.rows + entry) * dims;
  for (auto dim = static_cast<std::int32_t>(threadIdx.x); dim < dims; dim += kThreads) {
    kv[first + dim] = kv_element(layer, entry, step.positions[entry], dim);
  }
}

__global__ __launch_bounds__(kThreads) void touch(const uint4* data, std::int64_t count, std::uint32_t* sink) {
  std::uint32_t seen = 0;
  for (std::int64_t i = thread_of_grid(); i < count; i += threads_of_grid()) {
    const uint4 piece = data[i];
    seen |= piece.x | piece.y | piece.z | piece.w;
  }
  if (seen == 0xFFFFFFFFU) {  // never: the memory is zero; the compiler cannot know, and keeps the loads
    *sink = seen;
  }
}

__global__ __launch_bounds__(kThreads) void gather(GatherParams p) {
  constexpr int kLoads = 3;  // 1152 bytes are 72 pieces
  constexpr std::int32_t kWarps = kThreads / kWarp;
  const std::int32_t pieces = p.row_bytes / kPieceBytes;
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x) * kWarps + warp_index(); i < p.count;
       i += static_cast<std::int32_t>(gridDim.x) * kWarps) {
    const auto* source = reinterpret_cast<const uint4*>(row_address(p.slab, p.rows[i], p.host_stride));
    auto* target = reinterpret_cast<uint4*>(row_address(p.target, i, p.row_bytes));
    for (std::int32_t first = lane_index(); first < pieces; first += kLoads * kWarp) {
      uint4 loaded[kLoads];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (first + load * kWarp < pieces) {
          loaded[load] = source[first + load * kWarp];
        }
      }
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (first + load * kWarp < pieces) {
          target[first + load * kWarp] = loaded[load];
        }
      }
    }
  }
}

}  // namespace

void launch_fill_slabs(std::byte* slabs, std::int32_t layers, std::int32_t row_bytes, std::int64_t host_rows,
                       const LaunchContext& context) {
  launch(context, fill_slabs, dim3(16, static_cast<unsigned>(layers)), kThreads, 0, slabs, row_bytes, host_rows);
}

void launch_fill_scores(float* scores, std::int64_t stride, float* kth_score, const StepView& step, std::uint32_t seed,
                        const LaunchContext& context) {
  launch(context, fill_scores, dim3(16, static_cast<unsigned>(step.rows * kLayers)), kThreads, 0, scores, stride,
         kth_score, step, seed);
}

void launch_fill_kv(std::uint16_t* kv, std::int32_t layers, std::int32_t dims, const StepView& step,
                    const LaunchContext& context) {
  launch(context, fill_kv, dim3(static_cast<unsigned>(step.rows), static_cast<unsigned>(layers)), kThreads, 0, kv, dims,
         step);
}

void launch_touch(const std::byte* data, std::size_t bytes, std::uint32_t* sink, const LaunchContext& context) {
  launch(context, touch, 264, kThreads, 0, reinterpret_cast<const uint4*>(data),
         static_cast<std::int64_t>(bytes / sizeof(uint4)), sink);
}

void launch_gather(const GatherParams& params, std::int32_t blocks, const LaunchContext& context) {
  launch(context, gather, static_cast<unsigned>(blocks), kThreads, 0, params);
}

}  // namespace echo::bench
