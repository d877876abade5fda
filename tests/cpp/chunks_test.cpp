#include "kernels/chunks.hpp"

#include <gtest/gtest.h>

#include <map>

namespace echo {
namespace {

/// Stands for the driver: what is registered, and how many more registrations succeed.
struct Registrations {
  std::map<std::byte*, std::size_t> held;
  int left;

  bool take(std::byte* begin, std::size_t bytes) { return left-- > 0 && held.emplace(begin, bytes).second; }
  void give_back(std::byte* begin) { ASSERT_EQ(held.erase(begin), 1U); }
};

std::size_t take(Registrations& driver, std::byte* begin, std::size_t bytes, std::size_t chunk) {
  return take_in_chunks(
      begin, bytes, chunk, [&](std::byte* at, std::size_t size) { return driver.take(at, size); },
      [&](std::byte* at) { driver.give_back(at); });
}

TEST(Chunks, CoverTheBytesAndNoMore) {
  std::byte memory[100];
  Registrations driver{.held = {}, .left = 100};
  EXPECT_EQ(take(driver, memory, 100, 32), 100U);
  const std::map<std::byte*, std::size_t> expected{
      {memory, 32}, {memory + 32, 32}, {memory + 64, 32}, {memory + 96, 4}};
  EXPECT_EQ(driver.held, expected);
}

TEST(Chunks, OneThatFailsLeavesNothingTaken) {
  std::byte memory[100];
  for (int succeed = 0; succeed < 4; ++succeed) {
    Registrations driver{.held = {}, .left = succeed};
    EXPECT_EQ(take(driver, memory, 100, 32), 32U * static_cast<unsigned>(succeed));
    EXPECT_TRUE(driver.held.empty());
  }
}

TEST(Chunks, NothingNeedsNothing) {
  Registrations driver{.held = {}, .left = 0};
  EXPECT_EQ(take(driver, nullptr, 0, 32), 0U);
}

}  // namespace
}  // namespace echo
