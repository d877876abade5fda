#pragma once
// What the blocks of attend_cluster work on, and in which order; nothing in it depends on the batch but which team
// does which query.

#include <cstdint>

#include "kernels/mla_tile.cuh"
#include "kernels/params.hpp"

namespace echo::mla {

/// What a launch consists of.
struct Work {
  std::int32_t groups;  ///< of 64 heads
  std::int32_t items;   ///< query rows x groups
  std::int32_t teams;   ///< of blocks, one for each split; team t does items t, t + teams, ...
  std::uint32_t part_of_group;
  std::uint32_t part_of_split;

  /// A multiplication divides by d: what it takes is this. Exact for products with d below 2^32.
  static std::uint32_t part_of(std::int32_t d) {
    return d == 1 ? 0U : 0xFFFFFFFFU / static_cast<std::uint32_t>(d) + 1U;
  }

  __device__ __forceinline__ std::int32_t row(std::int32_t item) const {
    return part_of_group == 0 ? item
                              : static_cast<std::int32_t>(__umulhi(static_cast<std::uint32_t>(item), part_of_group));
  }
  __device__ __forceinline__ std::int32_t first_head(std::int32_t item) const {
    return (item - row(item) * groups) * kHeads;
  }
  /// A number by that of splits.
  __device__ __forceinline__ std::uint32_t of_split(std::uint32_t number) const {
    return part_of_split == 0 ? number : __umulhi(number, part_of_split);
  }
};

/// The block's split of a selection.
struct Split {
  std::int32_t begin;  ///< first entry
  std::int32_t count;  ///< of entries; of the last tile, half may be missing
  std::int32_t tiles;  ///< at least one, whose entries may all be missing

  __device__ __forceinline__ Split(const AttendParams& p, const Work& work, std::uint32_t rank) {
    const std::uint32_t halves = static_cast<std::uint32_t>(p.shape.top_k) / kHalf;
    begin = static_cast<std::int32_t>(work.of_split(rank * halves)) * kHalf;
    count = static_cast<std::int32_t>(work.of_split((rank + 1) * halves)) * kHalf - begin;
    tiles = max(1, (count + kTile - 1) / kTile);
  }
};

/// A tile of a block's work: the slots of it and of the rest of its item. Going on to the next takes an addition, but
/// at the end of an item.
struct Place {
  const std::int32_t* slots;
  std::int32_t count;  ///< of entries that exist from here on; of an item beyond the last, none
  std::int32_t item;

  __device__ __forceinline__ Place(const AttendParams& p, const Work& work, const Split& split, std::int32_t item_)
      : slots(p.slots), count(0), item(item_) {
    if (item < work.items) {
      slots += static_cast<std::int64_t>(work.row(item)) * p.shape.top_k + split.begin;
      count = split.count;
    }
  }
  __device__ __forceinline__ void advance(const AttendParams& p, const Work& work, const Split& split) {
    if (count > kTile) {
      slots += kTile;
      count -= kTile;
    } else {
      *this = Place(p, work, split, item + work.teams);
    }
  }
};

}  // namespace echo::mla
