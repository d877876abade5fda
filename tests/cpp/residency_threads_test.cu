// The protocol of residency.cuh with threads of the CPU that play blocks of a launch. No GPU is needed.

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cache_manager/residency.cuh"
#include "residency_block.cuh"

namespace echo::residency_test {
namespace {

Marks marks(std::int32_t now) { return {.pending = kPending, .failed = failed_at(now)}; }

using TestBlock = Block<LayerView, void (*)()>;

struct Crowd {
  const char* name;
  std::size_t threads;
  std::int32_t slots;
  std::int32_t rows;       ///< that there are
  std::int32_t wanted;     ///< distinct ones in a call; more than there are slots: some get none
  std::size_t per_thread;  ///< entries of a thread, at least
  TestBlock::Windows windows;
};

void PrintTo(const Crowd& crowd, std::ostream* out) { *out << crowd.name; }

void hold_up() {
  thread_local std::minstd_rand engine(static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id())));
  if (engine() % 32 == 0) {
    std::this_thread::yield();
  }
}

class ResidencyThreads : public ::testing::TestWithParam<Crowd> {};

/// What each thread asks for in a call: the wanted rows dealt out, then any of them again.
std::vector<std::vector<std::int32_t>> deal(const Crowd& crowd, std::mt19937& engine) {
  std::vector<std::int32_t> rows(at(crowd.rows));
  std::iota(rows.begin(), rows.end(), 0);
  std::ranges::shuffle(rows, engine);
  rows.resize(at(crowd.wanted));
  std::vector<std::vector<std::int32_t>> hands(crowd.threads);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    hands[i % crowd.threads].push_back(rows[i]);
  }
  for (std::vector<std::int32_t>& hand : hands) {
    while (hand.size() < crowd.per_thread) {
      hand.push_back(rows[engine() % rows.size()]);
    }
    std::ranges::shuffle(hand, engine);
  }
  return hands;
}

/// What is wrong after a call.
std::string fault_of(const Crowd& crowd, const Maps<LayerView>& maps, std::int32_t now,
                     const std::vector<TestBlock>& blocks) {
  std::size_t given = 0;
  std::size_t missed = 0;
  std::set<std::int32_t> failed;
  for (const auto& block : blocks) {
    given += block.given();
    missed += block.missed();
    for (std::size_t i = 0; i < block.rows().size(); ++i) {
      const std::int32_t row = block.rows()[i];
      const std::int32_t slot = block.slots()[i];
      if (slot == kNone) {
        failed.insert(row);
      } else if (slot < 0 || maps.host_of[at(slot)] != row || maps.stamp[at(slot)] != now) {
        return "row " + std::to_string(row) + " was told slot " + std::to_string(slot);
      }
    }
  }
  // A row gets one slot at most, and none only while all slots are in use by this call.
  const auto room = at(std::min(crowd.slots, crowd.wanted));
  if (given > room || failed.size() > at(crowd.wanted) - room || (failed.empty() && missed != given)) {
    return std::to_string(missed) + " misses, " + std::to_string(given) + " of them given slots, " +
           std::to_string(failed.size()) + " rows without one";
  }
  return maps.fault(now, marks(now));
}

TEST_P(ResidencyThreads, KeepTheMapsWholeAndGetTheirRows) {
  const Crowd& crowd = GetParam();
  Maps<LayerView> maps(crowd.slots, crowd.rows);
  const LayerView layer = maps.layer();
  std::mt19937 engine(1);
  std::vector<TestBlock> blocks;
  std::int32_t now = 0;
  std::int64_t operations = 0;
  std::string fault;
  bool done = false;
  void (*const pause)() = hold_up;
  // Between two calls, by one of the threads.
  const auto next = [&]() noexcept {
    if (now > 0) {
      fault = fault_of(crowd, maps, now, blocks);
    }
    done = !fault.empty() || operations >= 200'000;
    ++now;
    for (std::size_t released = engine() % 8 == 0 ? engine() % at(crowd.rows) : 0; released > 0; --released) {
      maps.release(static_cast<std::int32_t>(engine() % static_cast<unsigned>(crowd.rows)));
    }
    blocks.clear();
    for (std::vector<std::int32_t>& rows : deal(crowd, engine)) {
      operations += std::ssize(rows);
      blocks.emplace_back(layer, std::move(rows), now, marks(now), pause);
    }
  };
  next();
  std::barrier barrier(std::ssize(blocks), next);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < crowd.threads; ++i) {
    threads.emplace_back([&, i] {
      while (!done) {
        blocks[i].run(maps.content, crowd.windows);
        barrier.arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(fault, "") << "in call " << now - 1;
}

/// Prefetchers first, then blocks that recall some of what they fetched, tick after tick.
TEST_P(ResidencyThreads, MayFetchAhead) {
  const Crowd& crowd = GetParam();
  Maps<LayerView> maps(crowd.slots, crowd.rows);
  const LayerView layer = maps.layer();
  std::mt19937 engine(2);
  using TestPrefetcher = Prefetcher<LayerView, void (*)()>;
  std::vector<TestBlock> blocks;
  std::vector<TestPrefetcher> prefetchers;
  std::int32_t used = 0;
  std::int32_t now = 0;
  std::int64_t operations = 0;
  std::string fault;
  bool ahead = false;  // which half of a tick it is
  bool done = false;
  void (*const pause)() = hold_up;
  const auto next = [&]() noexcept {
    if (ahead) {
      std::int32_t fetched = 0;
      for (const TestPrefetcher& prefetcher : prefetchers) {
        fetched += prefetcher.fetched();
      }
      fault = fetched == used ? maps.fault(now, marks(now)) : "miscounted";
    } else if (now > 0) {
      fault = fault_of(crowd, maps, now, blocks);
    }
    done = !fault.empty() || operations >= 200'000;
    ahead = !ahead;
    if (ahead) {
      ++now;
      used = 0;
      blocks.clear();
      prefetchers.clear();
      for (std::size_t i = 0; i < crowd.threads; ++i) {
        std::vector<std::int32_t> rows(1 + engine() % 12);
        std::ranges::generate(rows,
                              [&] { return static_cast<std::int32_t>(engine() % static_cast<unsigned>(crowd.rows)); });
        prefetchers.emplace_back(layer, std::move(rows), now, used,
                                 TestPrefetcher::Limits{.at_once = 1 + engine() % 4,
                                                        .window = crowd.windows.slots,
                                                        .windows = 2,
                                                        .cap = 1 + static_cast<std::int32_t>(engine() % 32)},
                                 pause);
      }
    } else {
      for (std::vector<std::int32_t>& rows : deal(crowd, engine)) {
        operations += std::ssize(rows);
        blocks.emplace_back(layer, std::move(rows), now, marks(now), pause);
      }
    }
  };
  next();
  std::barrier barrier(static_cast<std::ptrdiff_t>(crowd.threads), next);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < crowd.threads; ++i) {
    threads.emplace_back([&, i] {
      while (!done) {
        if (ahead) {
          prefetchers[i].run(maps.content);
        } else {
          blocks[i].run(maps.content, crowd.windows);
        }
        barrier.arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(fault, "") << "in tick " << now;
}

INSTANTIATE_TEST_SUITE_P(Pools, ResidencyThreads,
                         ::testing::Values(Crowd{"AsSmallAsTheStepNeeds", 4, 24, 48, 24, 6, {4, 2}},
                                           Crowd{"AsSmallAsTheStepNeedsForTwo", 2, 3, 6, 3, 2, {2, 1}},
                                           Crowd{"Duplicates", 4, 6, 12, 5, 16, {3, 1}},
                                           Crowd{"Roomy", 3, 64, 256, 24, 16, {16, 2}},
                                           Crowd{"Everything", 4, 64, 64, 40, 20, {16, 2}},
                                           Crowd{"TooSmall", 4, 10, 32, 16, 8, {4, 2}},
                                           Crowd{"Many", 8, 40, 400, 40, 8, {8, 2}}),
                         [](const auto& crowd) { return crowd.param.name; });

}  // namespace
}  // namespace echo::residency_test
