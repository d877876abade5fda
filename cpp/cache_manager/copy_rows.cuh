#pragma once
// copy_rows: rows from host memory into their slots, by the warps of a block.
//
// A warp takes one row or a few at a time, a group, and loads them into registers, 16 bytes per lane and piece, before
// the first store; so loads can be under way before the slots are known (early_rows.cuh). Reads of neighbouring rows at
// the same time share address translations, which is what host reads cost: warps take groups in order, and where much
// is missing, blocks go one after the other, as many at once as keep the link busy. On an H200 that takes 64 us instead
// of 72 for 2,665 rows, 206 instead of 245 for 13,312; 512 to 1,024 rows at once are much the same, 1,536 are too many.

#include <cuda/atomic>

#include <cstdint>

#include "cache_manager/layer_view.hpp"
#include "cache_manager/nan_codes.cuh"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr int kCopyPieces = 4;  ///< 16-byte pieces that a lane has under way
inline constexpr std::int32_t kCopyRowsAtOnce = 1024;

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
        const std::int32_t row = row_of(piece);
        const std::byte* from = row_address(layer_.slab, list_.rows[first_ + row], layer_.host_stride);
        loaded_[i] = __ldcs(reinterpret_cast<const uint4*>(from) + piece - row * pieces_);
      }
    }
  }

  /// Once their slots are known. Rows that got none are dropped.
  __device__ void store(std::int32_t round) const {
    const std::int32_t noted = noted_codes(layer_) / kPieceBytes;  // pieces of a row
    std::uint32_t marks = 0;
#pragma unroll
    for (int i = 0; i < kCopyPieces; ++i) {
      const std::int32_t piece = round + i * kWarp + lane_index();
      if (piece < total_) {
        const std::int32_t row = row_of(piece);
        const std::int32_t slot = list_.slots[first_ + row];
        if (slot >= 0) {
          std::byte* to = row_address(layer_.pool, slot, layer_.row_bytes);
          reinterpret_cast<uint4*>(to)[piece - row * pieces_] = loaded_[i];
          marks |= piece - row * pieces_ < noted ? nan_marks(loaded_[i]) : 0U;
        }
      }
    }
    note_nan(layer_, marks);
  }

  /// All from a round on.
  __device__ void copy(std::int32_t round) {
    for (; round < total_; round += kRound) {
      load(round);
      store(round);
    }
  }

  static constexpr std::int32_t kPieceBytes = 16;
  static constexpr std::int32_t kRound = kCopyPieces * kWarp;

 private:
  /// piece / pieces_, which takes long in integers and holds up the load. Exact: both are small.
  __device__ std::int32_t row_of(std::int32_t piece) const {
    return static_cast<std::int32_t>(__fdividef(static_cast<float>(piece) + 0.5F, static_cast<float>(pieces_)));
  }

  const LayerView& layer_;
  const RowList& list_;
  std::int32_t first_;
  std::int32_t pieces_;
  std::int32_t total_;
  uint4 loaded_[kCopyPieces];
};

/// In which order the blocks of a grid copy: a block may begin as soon as so many have ended that those before it which
/// have not are no more than `most`. Only blocks before it can be in its way, and those were started before, so nobody
/// waits for somebody who waits. Each block leaves once, also one that copies nothing; the last resets the count.
struct CopyQueue {
  std::uint32_t* left;  ///< blocks that have ended
  std::int32_t place;   ///< of this block
  std::int32_t blocks;

  /// By one thread.
  __device__ void wait(std::int32_t most) const {
    const cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> count(*left);
    while (static_cast<std::int32_t>(count.load(cuda::memory_order_relaxed)) <= place - most) {
      __nanosleep(50);
    }
  }
  /// By one thread.
  __device__ void leave() const { atomicInc(left, static_cast<unsigned>(blocks - 1)); }
};

/// Shared memory of a copy.
struct CopyShared {
  std::int32_t next = 0;  ///< group that nobody has taken yet
  std::int32_t done = 0;  ///< warps that have found none left
};

/// How the `warps` warps of a block copy a list that is not empty.
class Copy {
 public:
  __device__ Copy(const LayerView& layer, const RowList& list, const CopyQueue& queue, std::int32_t warps)
      : layer_(layer), list_(list), queue_(queue), warps_(warps) {
    const std::int32_t pieces = max(1, layer.row_bytes / RowGroup::kPieceBytes);
    rows_ = max(1, min((list.count - 1) / warps + 1, RowGroup::kRound / pieces));
    groups_ = (list.count - 1) / rows_ + 1;
    // Other blocks are assumed to have as many to copy as this one.
    most_ = max(1, kCopyRowsAtOnce / min(list.count, rows_ * warps));
  }

  /// Whether it need not queue.
  __device__ bool begins_at_once() const { return queue_.place < most_; }
  /// By one thread of a block that has to.
  __device__ void wait() const { queue_.wait(most_); }

  /// By all warps, once slots are known. The last of them leaves the queue.
  __device__ void copy(CopyShared& shared) const {
    for (;;) {
      std::int32_t group = 0;
      if (lane_index() == 0) {
        group = atomicAdd(&shared.next, 1);
      }
      group = __shfl_sync(kAllLanes, group, 0);
      if (group >= groups_) {
        break;
      }
      const std::int32_t first = group * rows_;
      RowGroup(layer_, list_, first, min(rows_, list_.count - first)).copy(0);
    }
    if (lane_index() == 0 && atomicAdd(&shared.done, 1) == warps_ - 1) {
      queue_.leave();
    }
  }

 private:
  const LayerView& layer_;
  RowList list_;
  CopyQueue queue_;
  std::int32_t warps_;
  std::int32_t rows_;  ///< of a group
  std::int32_t groups_;
  std::int32_t most_;  ///< blocks that may copy at once
};

}  // namespace echo
