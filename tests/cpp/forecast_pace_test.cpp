// How many rows a layer may forecast, from step to step.

#include <gtest/gtest.h>

#include "cache_manager/forecast_lists.hpp"

namespace echo {
namespace {

constexpr std::int32_t kEntries = 13;

TEST(ForecastPace, FallsAtOnceToWhatThereWasTimeFor) {
  EXPECT_EQ(next_pace(2665, 800, 1, kEntries), 800);
  EXPECT_EQ(next_pace(0, 800, 5, kEntries), 800) << "the first step";
  EXPECT_EQ(next_pace(2665, 0, 2665, kEntries), kEntries) << "a row each, or nothing would ever be found out";
}

TEST(ForecastPace, GrowsWhileThereIsTimeAndNoFurtherThanForecastsGo) {
  EXPECT_EQ(next_pace(800, 800, 0, kEntries), 800 + 100 + kEntries);
  EXPECT_EQ(next_pace(800, 40, 0, kEntries), 800 + 5 + kEntries) << "little was near, and all of that was fetched";
  std::int32_t most = 0;
  for (int step = 0; step < 100'000; ++step) {
    most = next_pace(most, most, 0, kEntries);
  }
  EXPECT_EQ(most, kEntries * kMostForecast);
}

}  // namespace
}  // namespace echo
