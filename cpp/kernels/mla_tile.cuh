#pragma once
// Shapes and shared memory of attend_sm90: a tile is 128 entries of a selection in two halves of 64, each a matrix
// of 64 rows x 576 bf16 as the tensor cores read it.
//
// A matrix is nine atoms of 64 rows x 64 elements (128 bytes a row, 8 KB), each swizzled: 16-byte chunk i of row r lies
// at place i ^ (r % 8). The same bytes serve as K^T of the logits (K-major) and as V of the output (MN-major). The
// ninth atom, the rope part, is dead once a half's logits are there: its softmax weights [64 heads, 64 entries] take
// its place.

#include <cstddef>
#include <cstdint>

#include "echo/model_shape.hpp"
#include "kernels/mla_stretch.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/warp.cuh"

namespace echo::mla {

inline constexpr int kLatent = 512;
inline constexpr int kRope = 64;
inline constexpr int kRowDim = kLatent + kRope;
inline constexpr int kBf16RowBytes = 1152;

inline constexpr int kHeads = 64;  ///< of a block, filled up where there are fewer
inline constexpr int kHalf = 64;   ///< entries of half a tile
inline constexpr int kHalves = 2;
inline constexpr int kAtoms = kRowDim / 64;
inline constexpr int kLatentAtoms = kLatent / 64;
inline constexpr std::uint32_t kAtomBytes = 64 * 128;
inline constexpr std::uint32_t kMatrixBytes = kAtoms * kAtomBytes;
inline constexpr std::uint32_t kRopeOffset = kLatentAtoms * kAtomBytes;

inline constexpr int kGroup = 128;             ///< threads of a warpgroup
inline constexpr int kConsumers = 2 * kGroup;  ///< warpgroups 0 and 1; the others gather
inline constexpr int kGatherers = 2 * kGroup;
inline constexpr int kGatherWarps = kGatherers / kWarp;
inline constexpr int kThreads = kConsumers + kGatherers;
/// Arrivals at a half that is full: of the gathering warps and, where selections are one split (kWhole), of each
/// thread's copies.
template <bool kWhole>
inline constexpr int kFullArrivals = kWhole ? kGatherWarps + kGatherers : kGatherWarps;
/// Registers of a gatherer, and what is left for a consumer: FP8 rows go through registers, BF16 rows do not.
template <RowFormat kFormat>
inline constexpr int kGatherRegisters = kFormat == RowFormat::fp8_656 ? 64 : 48;
template <RowFormat kFormat>
inline constexpr int kConsumerRegisters = 64 * 1024 / kGatherers - kGatherRegisters<kFormat>;
static_assert(kConsumers == kGatherers);
inline constexpr int kConsumersBarrier = 1;
inline constexpr int kGatherBarrier = 2;
inline constexpr int kWeightsBarrier = 3;  ///< and the next, one for each half
inline constexpr int kToldBarrier = 5;     ///< likewise

/// Byte of 16-byte chunk `chunk` (0 to 7) of row `row` in an atom.
__device__ __forceinline__ std::uint32_t chunk_place(std::uint32_t row, std::uint32_t chunk) {
  return ptx::swizzled(row, chunk << 4);
}

inline constexpr int kTile = kHalves * kHalf;
inline constexpr std::uint32_t kComing = 4;  ///< tiles of which gathering warps tell each other: three, a power of two

struct Shared {
  std::byte query[kMatrixBytes];
  std::byte rows[kHalves][kMatrixBytes];
  float references[kHalves][kHeads];  ///< what the weights of a half are relative to
  float factors[kHalves][kHeads];     ///< and what is multiplied by to move there, where references are told early
  float sums[kHalves][kHeads];        ///< of weights, by warpgroup: of its halves of the tiles
  std::uint64_t entries[kHalves];     ///< bit i: entry i of a half has a row; where none has, the half is passed over
  std::uint64_t coming[kComing][kHalves];  ///< the same of tiles to come, for the gathering warps
  ptx::Mbarrier full[kHalves];             ///< a half has been gathered
  ptx::Mbarrier empty[kHalves];            ///< and may be overwritten
  std::uint32_t ticket;                    ///< of the block
  Stretch stretch;                         ///< what its team works on
};
static_assert(sizeof(Shared) + 1024 <= 227 * 1024);

}  // namespace echo::mla
