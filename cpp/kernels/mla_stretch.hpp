#pragma once
// How the tiles of attend_sm90's items are dealt out, item by item, in stretches of nearly the same length, none
// shorter than an item. A stretch begins and ends within items. Its team does the head of the item at its end first,
// then whole items, then the tail of the item at its beginning, for which it needs what the team before it has left
// of the head. So what others wait for comes first and waits for nothing.
//
//   stretch 0           | stretch 1                       The first tiles of item 1 are what team 0 does first, the
//   item 0       item 1 | item 1       item 2             others what team 1 does last.

#include <cstdint>

#include "cache_manager/address.hpp"

namespace echo::mla {

/// A team's stretch.
struct Stretch {
  std::int32_t number;  ///< the team's
  std::int32_t begin;   ///< first whole item
  std::int32_t end;     ///< of whole items
  std::int32_t length;  ///< tiles in all
  std::int32_t tiles;   ///< of a whole item
  std::int32_t head;    ///< tiles that are done here of item `end`
  std::int32_t tail;    ///< the first that is done here of item begin - 1; 0: none is

  ECHO_HOST_DEVICE std::int32_t first_item() const { return head > 0 ? end : begin; }
  /// kNone behind the last one, and behind kNone.
  ECHO_HOST_DEVICE std::int32_t item_after(std::int32_t item) const {
    if (item < begin) {
      return kNone;
    }
    const std::int32_t next = item == end ? begin : item + 1;
    return next < end ? next : tail > 0 ? begin - 1 : kNone;
  }
  ECHO_HOST_DEVICE std::int32_t first_tile(std::int32_t item) const { return item < begin ? tail : 0; }
  ECHO_HOST_DEVICE std::int32_t tiles_of(std::int32_t item) const {
    return item == end ? head : tiles - first_tile(item);
  }
  /// Whether an item is ended here; else it is handed over.
  ECHO_HOST_DEVICE bool ends(std::int32_t item) const { return item != end; }
  /// Items that are ended before it.
  ECHO_HOST_DEVICE std::int32_t ended_before(std::int32_t item) const { return (item < begin ? end : item) - begin; }
};

/// What is dealt out: all that needs no team's number is found out once, on the host.
struct Deal {
  std::int32_t items;
  std::int32_t tiles;  ///< of an item
  std::int32_t teams;  ///< at most one for each item
  std::int32_t each;   ///< items of a team, where all have as many; else 0: some items are cut
  std::int32_t quota;  ///< tiles that each team has at least
  std::int32_t rest;   ///< tiles that are left over

  static Deal of(std::int32_t items, std::int32_t tiles, std::int32_t teams) {
    return {.items = items,
            .tiles = tiles,
            .teams = teams,
            .each = items % teams == 0 ? items / teams : 0,
            .quota = items * tiles / teams,
            .rest = items * tiles % teams};
  }
  ECHO_HOST_DEVICE bool cut() const { return each == 0; }
  /// Of team `number`.
  ECHO_HOST_DEVICE Stretch stretch(std::int32_t number) const {
    if (!cut()) {  // the usual case, without divisions
      return {.number = number,
              .begin = number * each,
              .end = (number + 1) * each,
              .length = each * tiles,
              .tiles = tiles,
              .head = 0,
              .tail = 0};
    }
    const std::int32_t from = first(number);
    const std::int32_t to = first(number + 1);
    return {.number = number,
            .begin = (from + tiles - 1) / tiles,
            .end = to / tiles,
            .length = to - from,
            .tiles = tiles,
            .head = to % tiles,
            .tail = from % tiles};
  }

 private:
  /// floor(number x items x tiles / teams), in 32 bits.
  ECHO_HOST_DEVICE std::int32_t first(std::int32_t number) const { return number * quota + number * rest / teams; }
};

}  // namespace echo::mla
