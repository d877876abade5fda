#pragma once
// What the blocks of attend_cluster work on, and in which order; nothing in it depends on the batch but which cluster
// does which tiles.

#include <cstdint>

#include "kernels/mla_tile.cuh"
#include "kernels/params.hpp"

namespace echo::mla {

/// Tiles of an item; blocks of a cluster whose split is shorter by one have nothing in the last.
ECHO_HOST_DEVICE std::int32_t tiles_of(std::int32_t top_k, std::int32_t splits) {
  const std::int32_t halves = (top_k / kHalf + splits - 1) / splits;
  return (halves + kHalves - 1) / kHalves;
}

/// What a launch consists of. Items are query rows x groups of 64 heads: all rows' first group, then all rows' second.
struct Work {
  std::int32_t rows;  ///< of queries
  Deal deal;          ///< of the items to the clusters

  __device__ __forceinline__ std::int32_t row(std::int32_t item) const { return item % rows; }
  __device__ __forceinline__ std::int32_t first_head(std::int32_t item) const { return item / rows * kHeads; }
};

/// The block's split of a selection.
struct Split {
  std::int32_t begin;  ///< first entry
  std::int32_t count;  ///< of entries; of the last tiles, halves may be missing

  __device__ __forceinline__ Split(const AttendParams& p, std::int32_t rank) {
    const std::int32_t halves = p.shape.top_k / kHalf;
    begin = rank * halves / p.splits * kHalf;
    count = (rank + 1) * halves / p.splits * kHalf - begin;
  }
};

/// A tile of a block's work: the slots of it and of the rest of its item. Going on to the next takes an addition, but
/// at the end of an item.
struct Place {
  std::int32_t first;  ///< entry of all selections
  std::int32_t count;  ///< of entries that exist from here on; of an item beyond the last, none
  std::int32_t left;   ///< tiles, from here on
  std::int32_t item;

  __device__ __forceinline__ Place(const AttendParams& p, const Work& work, const Split& split, const Stretch& stretch,
                                   std::int32_t item_)
      : first(0), count(0), left(1), item(item_) {
    if (item != kNone) {
      const std::int32_t skipped = stretch.first_tile(item) * kTile;
      first = work.row(item) * p.shape.top_k + split.begin + skipped;
      count = split.count - skipped;
      left = stretch.tiles_of(item);
    }
  }
  /// Returns whether another item begins.
  __device__ __forceinline__ bool advance(const AttendParams& p, const Work& work, const Split& split,
                                          const Stretch& stretch) {
    if (--left > 0) {
      first += kTile;
      count -= kTile;
      return false;
    }
    *this = Place(p, work, split, stretch, stretch.item_after(item));
    return true;
  }
};

}  // namespace echo::mla
