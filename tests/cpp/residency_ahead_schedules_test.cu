// As residency_schedules_test.cu: warps that prefetch.

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "residency_stepped.cuh"

namespace echo::residency_test {
namespace {

/// Prefetchers of one launch: rows that each wants.
struct Scene {
  std::int32_t slots;
  std::vector<Seat> resident;
  std::vector<std::vector<std::int32_t>> wanted;
  std::int32_t cap = 100;
};

class Stage {
 public:
  explicit Stage(const Scene& scene) : scene_(scene) {}

  Schedules::Threads make() {
    maps_ = seated(scene_.slots, scene_.resident);
    used_ = 0;
    prefetchers_.clear();
    for (const std::vector<std::int32_t>& rows : scene_.wanted) {
      prefetchers_.emplace_back(
          maps_->layer(), rows, kNow, used_,
          TestPrefetcher::Limits{.at_once = 2, .window = scene_.slots, .windows = 2, .cap = scene_.cap}, kNoPause);
    }
    Schedules::Threads threads;
    for (TestPrefetcher& prefetcher : prefetchers_) {
      threads.emplace_back([this, &prefetcher] { prefetcher.run(maps_->content); });
    }
    return threads;
  }

  std::string fault() const {
    std::int32_t fetched = 0;
    for (const TestPrefetcher& prefetcher : prefetchers_) {
      fetched += prefetcher.fetched();
    }
    if (fetched != used_ || fetched > scene_.cap) {
      return std::to_string(fetched) + " fetched, " + std::to_string(used_) + " counted";
    }
    return maps_->fault(kNow, {.pending = echo_stepped::kPending, .failed = echo_stepped::kPending});
  }

 private:
  using TestPrefetcher = Prefetcher<SteppedLayer, NoPause>;

  Scene scene_;
  std::unique_ptr<Maps<SteppedLayer>> maps_;
  std::int32_t used_ = 0;
  std::vector<TestPrefetcher> prefetchers_;
};

void explore(const Scene& scene, int switches) { explore_orders(Stage(scene), switches); }

TEST(ResidencySchedules, OneRowAheadForMany) {
  explore({.slots = 3, .resident = {{0, 3}, {1, 4}}, .wanted = {{2}, {2}, {2}}}, 3);
}

TEST(ResidencySchedules, AheadIntoTheLastFreeSlot) {
  explore({.slots = 2, .resident = {{0, 3}}, .wanted = {{2, 3}, {3, 4}}}, 4);
}

TEST(ResidencySchedules, AheadOfWhatTheOtherEvicts) {
  explore({.slots = 2, .resident = {{0, 3}, {1, 4}}, .wanted = {{2, 0}, {1, 3}}}, 4);
}

TEST(ResidencySchedules, AheadIntoAPoolInUse) {
  explore({.slots = 2, .resident = {{0, kNow}, {1, kNow}}, .wanted = {{2}, {3, 2}}}, 4);
}

TEST(ResidencySchedules, AheadUpToACap) {
  explore({.slots = 3, .resident = {{0, 3}}, .wanted = {{2, 3}, {4, 2}}, .cap = 1}, 4);
}

TEST(ResidencySchedules, RandomScenesAhead) {
  std::mt19937 engine(2);
  for (int i = 0; i < 60; ++i) {
    Scene scene{.slots = 1 + static_cast<std::int32_t>(engine() % 3), .resident = {}, .wanted = {}};
    std::vector<std::int32_t> rows{0, 1, 2, 3, 4, 5};
    std::ranges::shuffle(rows, engine);
    for (std::size_t row = engine() % (at(scene.slots) + 1); row > 0; --row) {
      const auto tick = 1 + static_cast<std::int32_t>(engine() % 9);
      scene.resident.push_back(
          {.row = rows[row], .tick = engine() % 3 == 0 && tick < kNow ? prefetched_at(tick) : tick});
    }
    scene.wanted.resize(2 + engine() % 2);
    for (std::vector<std::int32_t>& wanted : scene.wanted) {
      wanted.resize(1 + engine() % 3);
      std::ranges::generate(wanted, [&] { return static_cast<std::int32_t>(engine() % 6); });
    }
    scene.cap = 1 + static_cast<std::int32_t>(engine() % 8);
    explore(scene, 2);
    ASSERT_FALSE(HasFailure()) << "scene " << i;
  }
}

}  // namespace
}  // namespace echo::residency_test
