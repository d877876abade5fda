#include "runtime/attention_splits.hpp"

#include <gtest/gtest.h>

#include "echo/planner.hpp"

namespace echo {
namespace {

TEST(AttentionSplits, SuitTheLargestStep) {
  const ModelShape shape = ModelShape::deepseek_v32();  // two groups of 64 heads
  EXPECT_EQ(chosen_attention_splits(shape, 1), 16);
  EXPECT_EQ(chosen_attention_splits(shape, 4), 16);  // 8 teams of 16
  EXPECT_EQ(chosen_attention_splits(shape, 6), 8);   // four halves of a tile; 11 splits of three would take 132 blocks
  EXPECT_EQ(chosen_attention_splits(shape, 8), 8);
  EXPECT_EQ(chosen_attention_splits(shape, 13), 4);  // 5 would take 130 blocks
  EXPECT_EQ(chosen_attention_splits(shape, 32), 2);  // 64 teams
  EXPECT_EQ(chosen_attention_splits(shape, 40), 2);  // 64 teams have a little more than one item each
  EXPECT_EQ(chosen_attention_splits(shape, 64), 1);  // 128 blocks
  EXPECT_EQ(chosen_attention_splits(shape, 1000), 1);
}

TEST(AttentionSplits, AreThoseOfTheHeadsAndTheSelection) {
  ModelShape shape = ModelShape::deepseek_v32();
  shape.query_heads = 64;
  EXPECT_EQ(chosen_attention_splits(shape, 64), 2);
  shape.query_heads = 1;  // as many as fill a group
  EXPECT_EQ(chosen_attention_splits(shape, 64), 2);
  shape.top_k = 512;  // so few rows that it does not matter
  for (const std::int64_t rows : {1, 16, 128}) {
    EXPECT_EQ(chosen_attention_splits(shape, rows), 4) << rows;
  }
}

TEST(AttentionSplits, AreInThePlan) {
  const ModelShape shape = ModelShape::deepseek_v32();
  RuntimeConfig config;
  config.device = "cpu";
  config.max_batch = 16;
  config.query_rows = 2;
  EXPECT_EQ(make_plan(shape, config).config.attention_splits, 2);
  config.attention_splits = 5;
  EXPECT_EQ(make_plan(shape, config).config.attention_splits, 5);
}

}  // namespace
}  // namespace echo
