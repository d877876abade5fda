#include "kernels/mla_stretch.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace echo::mla {
namespace {

/// All stretches of a launch: each tile done once, and in an order in which nobody waits for what waits itself.
void expect_all_dealt(std::int32_t items, std::int32_t tiles, std::int32_t teams) {
  SCOPED_TRACE(std::to_string(items) + " items of " + std::to_string(tiles) + " tiles, " + std::to_string(teams) +
               " teams");
  const Deal deal = Deal::of(items, tiles, teams);
  std::vector<std::int32_t> next(static_cast<std::size_t>(items), 0);  // tile of each item
  std::vector<std::int32_t> owner(static_cast<std::size_t>(items), kNone);
  for (std::int32_t number = 0; number < teams; ++number) {
    const Stretch stretch = deal.stretch(number);
    ASSERT_GE(stretch.length, tiles);
    ASSERT_LE(stretch.length, (items * tiles + teams - 1) / teams);
    std::int32_t length = 0;
    std::int32_t ended = 0;
    std::int32_t done = 0;
    for (std::int32_t item = stretch.first_item(); item != kNone; item = stretch.item_after(item), ++done) {
      ASSERT_TRUE(item >= 0 && item < items);
      auto& tile = next[static_cast<std::size_t>(item)];
      ASSERT_EQ(stretch.first_tile(item), tile);
      ASSERT_GT(stretch.tiles_of(item), 0);
      tile += stretch.tiles_of(item);
      length += stretch.tiles_of(item);
      ASSERT_EQ(stretch.ends(item), tile == tiles);
      if (stretch.first_tile(item) > 0) {
        ASSERT_EQ(owner[static_cast<std::size_t>(item)], number - 1);  // which has begun it before anything else
        ASSERT_EQ(stretch.item_after(item), kNone);                    // and here it is last
      }
      if (!stretch.ends(item)) {
        ASSERT_EQ(done, 0);
        owner[static_cast<std::size_t>(item)] = number;
      } else {
        ASSERT_EQ(stretch.ended_before(item), ended);
        ++ended;
      }
    }
    ASSERT_EQ(length, stretch.length);
    ASSERT_EQ(stretch.item_after(kNone), kNone);
  }
  for (const std::int32_t tile : next) {
    ASSERT_EQ(tile, tiles);
  }
}

TEST(MlaStretch, AllTilesAreDealt) {
  for (const std::int32_t teams : {1, 2, 15, 30, 66, 128, 131, 132}) {
    for (const std::int32_t tiles : {1, 2, 3, 8, 16}) {
      for (std::int32_t items = teams; items < 3 * teams + 5; items += items < teams + 20 ? 1 : 7) {
        expect_all_dealt(items, tiles, teams);
      }
      expect_all_dealt(100003, tiles, teams);
    }
  }
}

TEST(MlaStretch, WholeItemsWhereTheyDivide) {
  for (std::int32_t number = 0; number < 12; ++number) {
    const Stretch stretch = Deal::of(24, 16, 12).stretch(number);
    EXPECT_EQ(stretch.head, 0);
    EXPECT_EQ(stretch.tail, 0);
    EXPECT_EQ(stretch.begin, 2 * number);
  }
}

}  // namespace
}  // namespace echo::mla
