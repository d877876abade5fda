#include "runtime/block_allocator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace echo {
namespace {

std::int32_t runs_in(const std::vector<std::int32_t>& blocks) {
  std::int32_t runs = blocks.empty() ? 0 : 1;
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    runs += blocks[i] != blocks[i - 1] + 1;
  }
  return runs;
}

TEST(BlockAllocator, GivesOneRunWhereOneFits) {
  BlockAllocator allocator(100);
  EXPECT_EQ(runs_in(*allocator.allocate(40)), 1);
  EXPECT_EQ(runs_in(*allocator.allocate(60)), 1);
  EXPECT_EQ(allocator.free_blocks(), 0);
}

TEST(BlockAllocator, TakesTheSmallestRunThatFits) {
  BlockAllocator allocator(100);
  const auto a = *allocator.allocate(10);
  const auto keep_1 = *allocator.allocate(5);
  const auto b = *allocator.allocate(20);
  const auto keep_2 = *allocator.allocate(65);
  allocator.recycle(allocator.drop(a));
  allocator.recycle(allocator.drop(b));
  EXPECT_EQ(*allocator.allocate(10), a);
}

TEST(BlockAllocator, TakesTheLargestRunsWhereNoneFits) {
  BlockAllocator allocator(12);
  std::vector<std::vector<std::int32_t>> pieces;
  for (int i = 0; i < 4; ++i) {
    pieces.push_back(*allocator.allocate(3));
  }
  allocator.recycle(allocator.drop(pieces[0]));
  allocator.recycle(allocator.drop(pieces[2]));
  const auto blocks = *allocator.allocate(5);
  EXPECT_EQ(runs_in(blocks), 2);
  EXPECT_EQ(allocator.free_blocks(), 1);
}

TEST(BlockAllocator, RefusesWithoutChangingAnything) {
  BlockAllocator allocator(10);
  const auto blocks = *allocator.allocate(4);
  EXPECT_FALSE(allocator.allocate(7).has_value());
  EXPECT_EQ(allocator.free_blocks(), 6);
  allocator.recycle(allocator.drop(blocks));
  EXPECT_EQ(allocator.largest_run(), 10);
}

TEST(BlockAllocator, KeepsSharedBlocksUntilTheLastHolderDropsThem) {
  BlockAllocator allocator(10);
  const auto blocks = *allocator.allocate(4);
  const std::vector<std::int32_t> two(blocks.begin(), blocks.begin() + 2);
  allocator.share(two);
  EXPECT_EQ(allocator.holders(blocks[0]), 2);
  EXPECT_EQ(allocator.holders(blocks[2]), 1);
  const auto orphans = allocator.drop(blocks);
  EXPECT_EQ(orphans, std::vector<std::int32_t>(blocks.begin() + 2, blocks.end()));
  EXPECT_EQ(allocator.holders(blocks[0]), 1);
  EXPECT_EQ(allocator.free_blocks(), 6);
  allocator.recycle(orphans);
  allocator.recycle(allocator.drop(two));
  EXPECT_EQ(allocator.largest_run(), 10);
}

TEST(BlockAllocator, NeverGivesABlockTwiceAndMergesWhatComesBack) {
  constexpr std::int32_t kBlocks = 200;
  BlockAllocator allocator(kBlocks);
  std::mt19937 random(1);
  std::vector<std::vector<std::int32_t>> held;
  std::set<std::int32_t> owned;
  for (int i = 0; i < 20000; ++i) {
    if (held.empty() || random() % 2 == 0) {
      const auto count = static_cast<std::int32_t>(1 + random() % 40);
      const std::int32_t before = allocator.free_blocks();
      const std::int32_t largest = allocator.largest_run();
      const auto blocks = allocator.allocate(count);
      ASSERT_EQ(blocks.has_value(), count <= before);
      if (blocks) {
        ASSERT_EQ(std::ssize(*blocks), count);
        if (count <= largest) {
          ASSERT_EQ(runs_in(*blocks), 1);
        }
        for (const std::int32_t block : *blocks) {
          ASSERT_TRUE(block >= 0 && block < kBlocks);
          ASSERT_TRUE(owned.insert(block).second);
        }
        held.push_back(*blocks);
      }
    } else {
      std::swap(held[random() % held.size()], held.back());
      for (const std::int32_t block : held.back()) {
        owned.erase(block);
      }
      allocator.recycle(allocator.drop(held.back()));
      held.pop_back();
    }
    ASSERT_EQ(allocator.free_blocks(), kBlocks - static_cast<std::int32_t>(owned.size()));
  }
  for (const auto& blocks : held) {
    allocator.recycle(allocator.drop(blocks));
  }
  EXPECT_EQ(allocator.largest_run(), kBlocks);
}

}  // namespace
}  // namespace echo
