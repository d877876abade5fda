// The protocol of residency.cuh on the host, in interleavings that are forced step by step. No GPU is needed.

#include <gtest/gtest.h>

#include <thread>

#include "cache_manager/residency.cuh"
#include "residency_maps.cuh"

namespace echo::residency_test {
namespace {

constexpr std::int32_t kOld = 3;
constexpr std::int32_t kNow = 7;
constexpr std::int32_t kRow = 0;
constexpr std::int32_t kOther = 1;

Marks marks(std::int32_t now) { return {.pending = kPending, .failed = failed_at(now)}; }

/// Two slots: the first holds kRow, the second is free, unless a test says otherwise.
class Residency : public ::testing::Test {
 protected:
  Residency() : maps_(2, 4), layer_(maps_.layer()), slot_(maps_.seat(kRow, kOld)) {}

  void expect_whole() const { EXPECT_EQ(maps_.fault(kNow, marks(kNow)), ""); }
  /// The second half of a fetch, bytes included.
  void give(std::int32_t slot, std::int32_t row) {
    assign(layer_, slot, row);
    publish(layer_, slot, row, kNow);
    maps_.content[at(slot)] = row;
  }
  /// The free slot, which nobody else will pop.
  std::int32_t pop() { return layer_.free_slots[--layer_.replacement->free]; }

  Maps<LayerView> maps_;
  LayerView layer_;
  std::int32_t slot_;
};

TEST_F(Residency, AHitProtectsItsSlotFromWhoReadTheStampBefore) {
  const std::int32_t seen = maps_.stamp[at(slot_)];
  EXPECT_EQ(look_up(layer_, kRow, kNow), slot_);
  EXPECT_FALSE(evict(layer_, slot_, seen, kRow));
  EXPECT_EQ(look_up(layer_, kRow, kNow), slot_);
  expect_whole();
}

TEST_F(Residency, ASlotThatWasClaimedBetweenLookUpAndStampIsNoHit) {
  const std::int32_t named = maps_.slot_of[kRow];
  maps_.stamp[at(slot_)] = kClaimed;  // evict, between its two steps
  EXPECT_EQ(protect(layer_, named, kRow, kNow), Protection::unsettled);
  EXPECT_EQ(maps_.stamp[at(slot_)], kClaimed);
}

TEST_F(Residency, ARowWhoseSlotWasClaimedIsFetchedElsewhereAndStaysThere) {
  const std::int32_t other = pop();
  ASSERT_TRUE(evict(layer_, slot_, kOld, kRow));
  EXPECT_EQ(look_up(layer_, kRow, kNow), kNone);
  give(other, kRow);
  give(slot_, kOther);  // only now does the first thread go on
  EXPECT_EQ(look_up(layer_, kRow, kNow), other);
  EXPECT_EQ(look_up(layer_, kOther, kNow), slot_);
  expect_whole();
}

TEST_F(Residency, EvictingLeavesTheNewSlotOfARowThatHasMovedAlone) {
  const std::int32_t other = pop();
  give(other, kRow);
  EXPECT_TRUE(evict(layer_, slot_, kOld, kRow));
  EXPECT_EQ(maps_.slot_of[kRow], other);
}

TEST_F(Residency, ASlotThatHoldsAnotherRowByNowIsNoHit) {
  const std::int32_t named = maps_.slot_of[kRow];
  ASSERT_TRUE(evict(layer_, slot_, kOld, kRow));
  give(slot_, kOther);
  EXPECT_EQ(protect(layer_, named, kRow, kNow), Protection::stale);
  EXPECT_EQ(look_up(layer_, kRow, kNow), kNone);
}

TEST_F(Residency, OfTwoThatMissARowOneFetchesIt) {
  EXPECT_EQ(look_up(layer_, kOther, kNow), kNone);
  EXPECT_EQ(look_up(layer_, kOther, kNow), kPending);
  EXPECT_EQ(look_up(layer_, kOther, kNow), kPending);
  const std::int32_t slot = pop();
  give(slot, kOther);
  EXPECT_EQ(wait_for(layer_, kOther, kNow), slot);
  EXPECT_EQ(look_up(layer_, kOther, kNow), slot);
  expect_whole();
}

TEST_F(Residency, EitherHalfOfPublishingMayShowFirst) {
  const std::int32_t slot = pop();
  EXPECT_EQ(look_up(layer_, kOther, kNow), kNone);
  assign(layer_, slot, kOther);
  maps_.slot_of[kOther] = slot;  // of a slot that was free: its stamp says so still
  EXPECT_EQ(look_up(layer_, kOther, kNow), slot);
  publish(layer_, slot, kOther, kNow);
  maps_.content[at(slot)] = kOther;
  expect_whole();
  maps_.stamp[at(slot)] = kClaimed;  // of a slot that was evicted
  EXPECT_EQ(protect(layer_, slot, kOther, kNow), Protection::unsettled);
  maps_.stamp[at(slot)] = kNow;
  maps_.slot_of[kOther] = kPending;
  EXPECT_EQ(look_up(layer_, kOther, kNow), kPending);
}

TEST_F(Residency, AStampAheadOfTheTickIsAHit) {
  maps_.stamp[at(slot_)] = kNow + 1;  // a later block of rows was recalled first
  EXPECT_EQ(look_up(layer_, kRow, kNow), slot_);
  EXPECT_EQ(maps_.stamp[at(slot_)], kNow + 1);
}

TEST_F(Residency, ANewRowIsProtectedBeforeAnythingElse) {
  EXPECT_EQ(look_up(layer_, kRow, new_row_at(kNow)), slot_);  // begin
  EXPECT_FALSE(evict(layer_, slot_, kOld, kRow));
  EXPECT_EQ(look_up(layer_, kRow, new_row_at(kNow)), slot_);  // the pass begins once more
  EXPECT_EQ(look_up(layer_, kRow, kNow), slot_);
  EXPECT_EQ(maps_.stamp[at(slot_)], new_row_at(kNow));
}

TEST_F(Residency, AStampBelowAllTicksIsAHit) {
  maps_.stamp[at(slot_)] = kFree - 1 - kNow;
  EXPECT_EQ(look_up(layer_, kRow, kNow), slot_);
  expect_whole();
}

TEST_F(Residency, WhatFollowsPendingIsNotAskedAgain) {
  const std::int32_t slot = pop();
  EXPECT_EQ(look_up(layer_, kOther, kNow), kNone);
  std::thread waiter([&] { EXPECT_EQ(wait_for(layer_, kOther, kNow), slot); });
  give(slot, kOther);
  waiter.join();
  expect_whole();
}

TEST_F(Residency, ARowThatGotNoSlotIsFetchedByTheNextCall) {
  maps_.slot_of[kOther] = failed_at(kNow);
  EXPECT_EQ(look_up(layer_, kOther, kNow), kPending);  // nobody tries again
  EXPECT_EQ(wait_for(layer_, kOther, kNow), kNone);
  EXPECT_EQ(look_up(layer_, kOther, kNow + 1), kNone);
  EXPECT_EQ(look_up(layer_, kOther, kNow + 1), kPending);
  const std::int32_t slot = pop();
  assign(layer_, slot, kOther);
  publish(layer_, slot, kOther, kNow + 1);
  EXPECT_EQ(wait_for(layer_, kOther, kNow + 1), slot);
}

TEST_F(Residency, AFailureSaysInWhichCall) {
  for (const std::int32_t tick : {1, 2, kNow, kClaimed - 1}) {
    EXPECT_LT(failed_at(tick), kPending);
    EXPECT_NE(failed_at(tick), failed_at(tick - 1));
  }
}

}  // namespace
}  // namespace echo::residency_test
