#pragma once
// copy_rows: rows from host memory into their slots, by some warps of a block.
//
// A warp takes one row or a few at a time and loads them into registers, 16 bytes per lane and piece, before the first
// store; so the loads can be under way before the slots are known. Warps go side by side through the list, since reads
// of neighbouring rows at the same time share address translations, which is what host reads cost. Cost: the link's.
// How many rows should be under way in the whole grid was measured on an H200: 1,024 or 2,048 make no difference at a
// batch of 13, 2,048 is 4 and 8 % faster at 64 and 102.

#include "cache_manager/layer_view.hpp"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr int kCopyPieces = 4;  ///< 16-byte pieces that a lane has under way
inline constexpr std::int32_t kCopyRowsAtOnce = 2048;

/// Host rows in shared memory, and the slots that they get.
struct RowList {
  const std::int32_t* rows;
  const std::int32_t* slots;  ///< negative where there is none
  std::int32_t count;
};

/// Rows of the list that go through one warp together: their pieces, from `first` on, in registers.
class RowGroup {
 public:
  __device__ RowGroup(const LayerView& layer, const RowList& list, std::int32_t first, std::int32_t rows)
      : layer_(layer), list_(list), first_(first), pieces_(layer.row_bytes / kPieceBytes), total_(rows * pieces_) {}

  /// Pieces of the whole group; a round moves kCopyPieces * kWarp of them.
  __device__ std::int32_t total() const { return total_; }

  __device__ void load(std::int32_t round) {
#pragma unroll
    for (int i = 0; i < kCopyPieces; ++i) {
      const std::int32_t piece = round + i * kWarp + lane_index();
      if (piece < total_) {
        const std::byte* row = row_address(layer_.slab, list_.rows[first_ + piece / pieces_], layer_.host_stride);
        loaded_[i] = __ldcs(reinterpret_cast<const uint4*>(row) + piece % pieces_);
      }
    }
  }

  /// Once their slots are known. Rows that got none are dropped.
  __device__ void store(std::int32_t round) const {
#pragma unroll
    for (int i = 0; i < kCopyPieces; ++i) {
      const std::int32_t piece = round + i * kWarp + lane_index();
      if (piece < total_) {
        const std::int32_t slot = list_.slots[first_ + piece / pieces_];
        if (slot >= 0) {
          reinterpret_cast<uint4*>(row_address(layer_.pool, slot, layer_.row_bytes))[piece % pieces_] = loaded_[i];
        }
      }
    }
  }

  static constexpr std::int32_t kPieceBytes = 16;
  static constexpr std::int32_t kRound = kCopyPieces * kWarp;

 private:
  const LayerView& layer_;
  const RowList& list_;
  std::int32_t first_;
  std::int32_t pieces_;
  std::int32_t total_;
  uint4 loaded_[kCopyPieces];
};

/// Copies the rows of a list, `warp` of `warps` warps. `meet_slots` is called, once, by all of them after their first
/// loads: slots are read behind it. Not more than the grid's share of kCopyRowsAtOnce are under way.
template <typename MeetSlots>
__device__ void copy_rows(const LayerView& layer, const RowList& list, std::int32_t warp, std::int32_t warps,
                          const MeetSlots& meet_slots) {
  const std::int32_t pieces = layer.row_bytes / RowGroup::kPieceBytes;
  const std::int32_t share = max(1, kCopyRowsAtOnce / static_cast<std::int32_t>(gridDim.x));  // of this block, at once
  warps = min(warps, share);
  std::int32_t rows = share / warps;
  while (rows > 1 && (rows * pieces > RowGroup::kRound || rows * warps > list.count)) {
    --rows;
  }
  const std::int32_t start = warp < warps ? warp * rows : list.count;
  RowGroup group(layer, list, start, max(0, min(rows, list.count - start)));
  group.load(0);
  meet_slots();
  group.store(0);
  for (std::int32_t round = RowGroup::kRound; round < group.total(); round += RowGroup::kRound) {
    group.load(round);
    group.store(round);
  }
  for (std::int32_t first = start + warps * rows; first < list.count; first += warps * rows) {
    RowGroup next(layer, list, first, min(rows, list.count - first));
    for (std::int32_t round = 0; round < next.total(); round += RowGroup::kRound) {
      next.load(round);
      next.store(round);
    }
  }
}

}  // namespace echo
