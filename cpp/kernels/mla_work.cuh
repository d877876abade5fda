#pragma once
// What the blocks of attend_sm90 work on, and in which order; nothing in it depends on the batch but which team
// does which tiles.

#include <cstdint>

#include "kernels/attend_sm90.hpp"
#include "kernels/mla_tile.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"

namespace echo::mla {

/// Tiles of an item; blocks whose split is shorter by one have nothing in the last.
ECHO_HOST_DEVICE std::int32_t tiles_of(std::int32_t top_k, std::int32_t splits) {
  const std::int32_t halves = (top_k / kHalf + splits - 1) / splits;
  return (halves + kHalves - 1) / kHalves;
}

/// What a launch's teams have: equal parts of all tiles, or one item each.
enum class Teams : std::uint8_t { deal, once };

/// A block's team, and the split of its items that it has.
struct Seat {
  std::uint32_t team;
  std::uint32_t rank;
};

/// What a launch consists of. Items are query rows x groups of 64 heads: all rows' first group, then all rows' second.
/// Of equal stretches of them, half of which are one group's, a row's two begin at about the same time, and one finds
/// in the L2 cache what the other has brought.
struct Work {
  std::int32_t rows;  ///< of queries
  Deal deal;          ///< of the items to the teams, which have a block for each split
  std::uint32_t part_of_rows;
  std::uint32_t part_of_splits;

  /// A multiplication divides by d: what it takes is this. Exact for products with d below 2^32.
  static std::uint32_t part_of(std::int32_t d) {
    return d == 1 ? 0U : 0xFFFFFFFFU / static_cast<std::uint32_t>(d) + 1U;
  }
  static Work of(const ShapeView& shape, std::int32_t rows, std::int32_t splits, std::int32_t teams) {
    const std::int32_t items = attend_items(shape, rows);
    return {.rows = rows,
            .deal = Deal::of(items, tiles_of(shape.top_k, splits), teams < items ? teams : items),
            .part_of_rows = part_of(rows),
            .part_of_splits = part_of(splits)};
  }

  Teams teams() const { return deal.items == deal.teams ? Teams::once : Teams::deal; }

  __device__ __forceinline__ std::int32_t group(std::int32_t item) const {
    return static_cast<std::int32_t>(quotient(static_cast<std::uint32_t>(item), part_of_rows));
  }
  __device__ __forceinline__ std::int32_t row(std::int32_t item) const { return item - group(item) * rows; }
  __device__ __forceinline__ std::int32_t first_head(std::int32_t item) const { return group(item) * kHeads; }
  /// A number by that of splits.
  __device__ __forceinline__ std::uint32_t by_splits(std::uint32_t number) const {
    return quotient(number, part_of_splits);
  }
  __device__ __forceinline__ Seat seat(std::uint32_t ticket, std::int32_t splits) const {
    const std::uint32_t team = by_splits(ticket);
    return {team, ticket - team * static_cast<std::uint32_t>(splits)};
  }

 private:
  static __device__ __forceinline__ std::uint32_t quotient(std::uint32_t number, std::uint32_t part) {
    return part == 0 ? number : __umulhi(number, part);
  }
};

/// Row of the pass.
__device__ __forceinline__ std::int64_t query_row(const AttendParams& p, const Work& work, std::int32_t item) {
  return static_cast<std::int64_t>(p.block.first) + work.row(item);
}

/// The block's own.
__device__ __forceinline__ Seat seat_of(const AttendParams& p, const Work& work, const Shared& shared) {
  const auto ticket = static_cast<std::uint32_t>(ptx::load_shared_volatile(ptx::shared_address(&shared.ticket)));
  return work.seat(ticket, p.splits);
}

/// The block's split of a selection.
struct Split {
  std::int32_t begin;  ///< first entry
  std::int32_t count;  ///< of entries; of the last tiles, halves may be missing

  __device__ __forceinline__ Split(const AttendParams& p, const Work& work, std::uint32_t rank) {
    const std::uint32_t halves = static_cast<std::uint32_t>(p.shape.top_k) / kHalf;
    begin = static_cast<std::int32_t>(work.by_splits(rank * halves)) * kHalf;
    count = static_cast<std::int32_t>(work.by_splits((rank + 1) * halves)) * kHalf - begin;
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
  __device__ __forceinline__ void advance(const AttendParams& p, const Work& work, const Split& split,
                                          const Stretch& stretch) {
    if (--left > 0) {
      first += kTile;
      count -= kTile;
    } else {
      *this = Place(p, work, split, stretch, stretch.item_after(item));
    }
  }
};

}  // namespace echo::mla
