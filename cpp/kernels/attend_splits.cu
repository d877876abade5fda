// attend_splits: sparse MLA over one split of a selection, for 16 heads of a query row, in fp32.
//
// Block (split, head group, row) of 8 warps. It goes through the split's slots in tiles of 16:
// decodes the rows into shared memory once for all heads; takes the 16 x 16 logits, each warp over
// an eighth of the dimensions (4 heads x 2 tokens per lane), added up in order; updates the
// softmax's maximum and sum; adds weights x rows to the output, of which a thread holds its columns
// for all 16 heads. Empty entries have weight 0 and their rows read as zeros, so their bytes are
// never touched; tiles without entries are skipped. Splits are places of the selection, not of the
// grid: the bits do not depend on the batch. Rows lie 4 floats apart from a multiple of the banks:
// no conflicts. Cost: heads x entries x (2 latent + rope) multiply-adds (B = 13, V3.2: 3.7 G, 0.12
// ms at the fp32 peak); 83 KB of shared memory for two blocks per multiprocessor.
#include <cmath>
#include <string>

#include "echo/errors.hpp"
#include "kernels/attend.hpp"
#include "kernels/elements.cuh"
#include "kernels/launch.cuh"
#include "kernels/row_decode.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeads = 16;
constexpr int kTile = 16;  ///< rows of a tile
constexpr int kLaneHeads = 4;
constexpr int kLaneRows = 2;
constexpr int kRowGroups = kTile / kLaneRows;
constexpr int kMaxColumns = 4;
static_assert(kHeads * kTile == kThreads);
static_assert(kHeads / kLaneHeads * kRowGroups == kWarp);

/// Dimensions of a row, filled up with zeros so that each warp gets a whole number of float4.
ECHO_HOST_DEVICE std::int32_t padded(std::int32_t dim) { return (dim + 31) / 32 * 32; }

struct Shared {
  std::int32_t stride;  ///< floats between rows, and between queries
  float* query;         ///< [kHeads, stride]
  float* rows;          ///< [kTile, stride]
  float* logits;        ///< [kWarps, kHeads, kTile] parts
  float* weights;       ///< [kTile, kHeads]
  float* factors;       ///< [kHeads] what sums so far are scaled by
  std::int32_t* slots;  ///< [kTile]

  __device__ explicit Shared(std::int32_t row_dim) : stride(padded(row_dim) + 4) {
    extern __shared__ __align__(16) float memory[];
    query = memory;
    rows = query + kHeads * stride;
    logits = rows + kTile * stride;
    weights = logits + kWarps * kHeads * kTile;
    factors = weights + kTile * kHeads;
    slots = reinterpret_cast<std::int32_t*>(factors + kHeads);
  }
  static std::size_t bytes(std::int32_t row_dim) {
    const auto floats =
        (kHeads + kTile) * (padded(row_dim) + 4) + kWarps * kHeads * kTile + kTile * kHeads + kHeads + kTile;
    return static_cast<std::size_t>(floats) * sizeof(float);
  }
};

__device__ void load_query(const AttendParams& p, std::int64_t row, std::int32_t first_head, const Shared& shared) {
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  for (int h = warp_index(); h < kHeads; h += kWarps) {
    const bool real = first_head + h < p.shape.query_heads;
    const std::int64_t source = (row * p.shape.query_heads + first_head + h) * dim;
    for (std::int32_t d = lane_index(); d < shared.stride; d += kWarp) {
      shared.query[h * shared.stride + d] = real && d < dim ? load_float(p.q, p.q_dtype, source + d) : 0.0F;
    }
  }
}

/// Reads the slots of a tile; says whether there are any.
__device__ bool load_slots(const AttendParams& p, const std::int32_t* slots, std::int32_t count, const Shared& shared,
                           const KernelErrorView& errors) {
  bool any = false;
  if (threadIdx.x < kTile) {
    std::int32_t slot = static_cast<std::int32_t>(threadIdx.x) < count ? slots[threadIdx.x] : kNone;
    if (slot != kNone && (slot < 0 || slot >= p.layer.slots)) {
      errors.raise(KernelError::bad_slot);
      slot = kNone;
    }
    shared.slots[threadIdx.x] = slot;
    any = slot != kNone;
  }
  return __syncthreads_or(any);
}

template <RowFormat kFormat>
__device__ void load_rows(const AttendParams& p, const Shared& shared) {
  constexpr int kLoads = kFormat == RowFormat::fp32 ? 3 : 5;  // pieces of a row that a lane has in flight
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  for (int t = warp_index(); t < kTile; t += kWarps) {
    const std::int32_t slot = shared.slots[t];
    const std::byte* row = row_address(p.layer.pool, slot == kNone ? 0 : slot, p.layer.row_bytes);
    float* target = shared.rows + t * shared.stride;
    for (std::int32_t first = lane_index() * 4; first < shared.stride; first += kLoads * kWarp * 4) {
      RowPiece<kFormat> pieces[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const std::int32_t d = first + i * kWarp * 4;
        if (slot != kNone && d < dim) {
          pieces[i].load(row, d, p.shape);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const std::int32_t d = first + i * kWarp * 4;
        if (d < shared.stride) {
          *reinterpret_cast<float4*>(target + d) =
              slot != kNone && d < dim ? pieces[i].decode() : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        }
      }
    }
  }
}

/// The warp's part of the logits: its eighth of the dimensions.
__device__ void multiply_queries(std::int32_t row_dim, const Shared& shared) {
  constexpr int kHeadGroups = kHeads / kLaneHeads;
  const int head = lane_index() / kRowGroups;
  const int token = lane_index() % kRowGroups;
  const std::int32_t part = padded(row_dim) / kWarps;
  const float* queries = shared.query + head * shared.stride + warp_index() * part;
  const float* rows = shared.rows + token * shared.stride + warp_index() * part;
  float dots[kLaneHeads][kLaneRows] = {};
  for (std::int32_t d = 0; d < part; d += 4) {
    float4 row[kLaneRows];
#pragma unroll
    for (int t = 0; t < kLaneRows; ++t) {
      row[t] = *reinterpret_cast<const float4*>(rows + t * kRowGroups * shared.stride + d);
    }
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      const float4 query = *reinterpret_cast<const float4*>(queries + h * kHeadGroups * shared.stride + d);
#pragma unroll
      for (int t = 0; t < kLaneRows; ++t) {
        float dot = fmaf(query.x, row[t].x, dots[h][t]);
        dot = fmaf(query.y, row[t].y, dot);
        dot = fmaf(query.z, row[t].z, dot);
        dots[h][t] = fmaf(query.w, row[t].w, dot);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
    for (int t = 0; t < kLaneRows; ++t) {
      shared.logits[(warp_index() * kHeads + head + h * kHeadGroups) * kTile + token + t * kRowGroups] = dots[h][t];
    }
  }
}

/// Maximum and sum of one head so far, kept by the 16 threads of the head.
struct Softmax {
  float most = -INFINITY;
  float sum = 0.0F;
};

/// Turns the tile's logits into weights; a thread per head and row.
__device__ void soften(float scale, const Shared& shared, Softmax& softmax) {
  const int head = static_cast<int>(threadIdx.x) / kTile;
  const int token = static_cast<int>(threadIdx.x) % kTile;
  float logit = 0.0F;
#pragma unroll
  for (int part = 0; part < kWarps; ++part) {
    logit += shared.logits[part * kThreads + static_cast<int>(threadIdx.x)];
  }
  const bool empty = shared.slots[token] == kNone;
  logit = empty ? -INFINITY : logit * scale;
  float most = logit;
  for (int step = kTile / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  }
  most = fmaxf(most, softmax.most);
  const float origin = most == -INFINITY ? 0.0F : most;  // no inf - inf where all is empty so far
  const float weight = empty ? 0.0F : expf(logit - origin);
  const float factor = expf(softmax.most - origin);
  float sum = weight;
  for (int step = kTile / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  softmax.most = most;
  softmax.sum = fmaf(softmax.sum, factor, sum);
  shared.weights[token * kHeads + head] = weight;
  if (token == 0) {
    shared.factors[head] = factor;
  }
}

/// sums = sums * factor + weights x rows, a thread's columns of the latent part.
template <int kColumns>
__device__ void add_rows(std::int32_t latent_dim, const Shared& shared, float (&sums)[kColumns][kHeads]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float factor = shared.factors[h];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[c][h] *= factor;
    }
  }
#pragma unroll 4
  for (int t = 0; t < kTile; ++t) {
    float weights[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; h += 4) {
      const float4 four = *reinterpret_cast<const float4*>(shared.weights + t * kHeads + h);
      weights[h] = four.x;
      weights[h + 1] = four.y;
      weights[h + 2] = four.z;
      weights[h + 3] = four.w;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const std::int32_t column = static_cast<std::int32_t>(threadIdx.x) + c * kThreads;
      const float value = column < latent_dim ? shared.rows[t * shared.stride + column] : 0.0F;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        sums[c][h] = fmaf(weights[h], value, sums[c][h]);
      }
    }
  }
}

template <RowFormat kFormat, int kColumns>
__global__ __launch_bounds__(kThreads, kColumns > 2 ? 1 : 2) void attend_splits(AttendParams p, std::int32_t first,
                                                                                AttendPartials partials,
                                                                                KernelErrorView errors) {
  const std::int32_t row_dim = p.shape.latent_dim + p.shape.rope_dim;
  const Shared shared(row_dim);
  const std::int64_t i = blockIdx.z;  // row of the chunk
  const auto split = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t first_head = static_cast<std::int32_t>(blockIdx.y) * kHeads;
  const std::int32_t part = (p.shape.top_k + p.splits - 1) / p.splits;
  const std::int32_t end = min(p.shape.top_k, (split + 1) * part);
  const std::int32_t* slots = p.slots + (first + i) * p.shape.top_k;

  load_query(p, p.block.first + first + i, first_head, shared);
  Softmax softmax;
  float sums[kColumns][kHeads] = {};
  for (std::int32_t entry = split * part; entry < end; entry += kTile) {
    // Also waits until the tile before has been used, and the first time for the queries.
    if (!load_slots(p, slots + entry, end - entry, shared, errors)) {
      continue;
    }
    load_rows<kFormat>(p, shared);
    __syncthreads();
    multiply_queries(row_dim, shared);
    __syncthreads();
    soften(p.scale, shared, softmax);
    __syncthreads();
    add_rows<kColumns>(p.shape.latent_dim, shared, sums);
    __syncthreads();
  }

  const std::int64_t place = (i * p.splits + split) * p.shape.query_heads + first_head;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const std::int32_t column = static_cast<std::int32_t>(threadIdx.x) + c * kThreads;
      if (first_head + h < p.shape.query_heads && column < p.shape.latent_dim) {
        partials.sums[(place + h) * p.shape.latent_dim + column] = sums[c][h];
      }
    }
  }
  const std::int32_t head = static_cast<std::int32_t>(threadIdx.x) / kTile;
  if (threadIdx.x % kTile == 0 && first_head + head < p.shape.query_heads) {
    partials.shares[place + head] = make_float2(softmax.most, softmax.sum);
  }
}

template <RowFormat kFormat, int kColumns>
void launch_splits(const AttendParams& params, std::int32_t first, std::int32_t count, const AttendPartials& partials,
                   const LaunchContext& context) {
  const auto kernel = attend_splits<kFormat, kColumns>;
  const std::size_t bytes = Shared::bytes(params.shape.latent_dim + params.shape.rope_dim);
  ECHO_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const dim3 grid(static_cast<unsigned>(params.splits), blocks_for(params.shape.query_heads, kHeads),
                  static_cast<unsigned>(count));
  launch(context, kernel, grid, kThreads, bytes, params, first, partials, context.errors);
}

}  // namespace

void check_attend(const ShapeView& shape, int device) {
  if (shape.latent_dim > kMaxColumns * kThreads) {
    throw NotSupported("latent_dim: " + std::to_string(shape.latent_dim) +
                       " given, the CUDA backend attends to at most " + std::to_string(kMaxColumns * kThreads));
  }
  int most = 0;
  ECHO_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (const std::size_t bytes = Shared::bytes(shape.latent_dim + shape.rope_dim);
      bytes > static_cast<std::size_t>(most)) {
    throw NotSupported("latent_dim, rope_dim: rows of " + std::to_string(shape.latent_dim + shape.rope_dim) + " need " +
                       std::to_string(bytes) + " bytes of shared memory, the device has " + std::to_string(most));
  }
}

void launch_attend_splits(const AttendParams& params, std::int32_t first, std::int32_t count,
                          const AttendPartials& partials, const LaunchContext& context) {
  switch (params.shape.row_format) {
    case RowFormat::fp8_656:
      return launch_splits<RowFormat::fp8_656, 2>(params, first, count, partials, context);
    case RowFormat::bf16_1152:
      return launch_splits<RowFormat::bf16_1152, 2>(params, first, count, partials, context);
    case RowFormat::fp32:
      return params.shape.latent_dim <= 2 * kThreads
                 ? launch_splits<RowFormat::fp32, 2>(params, first, count, partials, context)
                 : launch_splits<RowFormat::fp32, kMaxColumns>(params, first, count, partials, context);
    case RowFormat::raw:
      break;
  }
  throw NotSupported("row_format: raw rows cannot be attended to; choose fp8_656, bf16_1152 or fp32");
}

}  // namespace echo
