// The protocol of residency.cuh in every order of a few threads' memory accesses, up to a number of switches between
// them: what threads of the CPU meet once in a million calls is met here every time. Orders are those of sequential
// consistency; what weaker memory adds is left to the GPU.

#include <gtest/gtest.h>

#include <cuda/atomic>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cache_manager/layer_view.hpp"
#include "schedules.hpp"

// The text of residency.cuh once more, in a namespace of its own, with words that hand control to the schedule.
namespace cuda {
template <typename T, thread_scope>
class SteppedWord {
 public:
  __host__ __device__ explicit SteppedWord(T& word) : word_(&word) {}

  __host__ __device__ T load(memory_order) const {
#ifndef __CUDA_ARCH__
    echo::residency_test::Schedules::before_load(word_);
#endif
    return *word_;
  }
  __host__ __device__ void store(T value, memory_order) const {
    step();
    set(value);
  }
  __host__ __device__ bool compare_exchange_strong(T& expected, T value, memory_order) const {
    step();
    const bool equal = *word_ == expected;
    expected = *word_;
    set(equal ? value : *word_);
    return equal;
  }
  __host__ __device__ T fetch_max(T value, memory_order) const {
    step();
    return set(*word_ < value ? value : *word_);
  }
  __host__ __device__ T fetch_add(T value, memory_order) const {
    step();
    return set(*word_ + value);
  }
  __host__ __device__ T fetch_sub(T value, memory_order) const {
    step();
    return set(*word_ - value);
  }

 private:
  __host__ __device__ void step() const {
#ifndef __CUDA_ARCH__
    echo::residency_test::Schedules::before_change();
#endif
  }
  /// Returns the value before.
  __host__ __device__ T set(T value) const {
    const T before = *word_;
    *word_ = value;
#ifndef __CUDA_ARCH__
    if (before != value) {
      echo::residency_test::Schedules::changed();
    }
#endif
    return before;
  }

  T* word_;
};
}  // namespace cuda

namespace echo_stepped {
using namespace echo;
}
#define echo echo_stepped
#define atomic_ref SteppedWord
#include "cache_manager/residency.cuh"
#undef atomic_ref
#undef echo

#include "residency_block.cuh"

namespace echo_stepped {

/// The functions above are found by this type of their argument.
struct SteppedLayer : LayerView {};

}  // namespace echo_stepped

namespace echo::residency_test {
namespace {

using echo_stepped::SteppedLayer;

constexpr std::int32_t kNow = 9;

struct NoPause {
  void operator()() const {}
};
constexpr NoPause kNoPause;
using TestBlock = Block<SteppedLayer, NoPause>;

struct Seat {
  std::int32_t row;
  std::int32_t tick;
};

/// What is there before a call, and what its threads do.
struct Scene {
  std::int32_t slots;
  std::vector<Seat> resident;
  std::vector<std::vector<std::int32_t>> blocks;  ///< rows that each looks up
  std::vector<std::int32_t> written = {};         ///< new rows, which have slots
  std::vector<std::int32_t> failed_before = {};   ///< rows for which the call before got no slot
};

class Stage {
 public:
  explicit Stage(const Scene& scene) : scene_(scene) {}

  Schedules::Threads make() {
    maps_ = std::make_unique<Maps<SteppedLayer>>(scene_.slots, kRows);
    for (const Seat& seat : scene_.resident) {
      maps_->seat(seat.row, seat.tick);
    }
    for (const std::int32_t row : scene_.failed_before) {
      maps_->slot_of[at(row)] = echo_stepped::failed_at(kNow - 1);
    }
    blocks_.clear();
    for (const std::vector<std::int32_t>& rows : scene_.blocks) {
      blocks_.emplace_back(maps_->layer(), rows, kNow, kMarks, kNoPause);
    }
    Schedules::Threads threads;
    for (TestBlock& block : blocks_) {
      threads.emplace_back([this, &block] { block.run(maps_->content, {.slots = scene_.slots, .planned = 0}); });
    }
    for (const std::int32_t row : scene_.written) {
      threads.emplace_back([this, row] {  // as append_row does
        const std::int32_t slot = slot_word(maps_->layer(), row).load(cuda::memory_order_relaxed);
        maps_->content[at(slot)] = row;
      });
    }
    return threads;
  }

  std::string fault() const {
    std::vector<std::int32_t> wanted;
    std::size_t given = 0;
    std::size_t failed = 0;
    std::vector<int> fetched(kRows, 0);
    for (const TestBlock& block : blocks_) {
      given += block.given();
      for (std::size_t i = 0; i < block.rows().size(); ++i) {
        const std::int32_t row = block.rows()[i];
        wanted.push_back(row);
        if (block.slots()[i] == kNone) {
          ++failed;
        } else if (const std::string fault = fault_of(row, block.slots()[i]); !fault.empty()) {
          return fault;
        }
      }
    }
    for (const std::int32_t row : scene_.written) {
      if (const std::string fault = fault_of(row, maps_->slot_of[at(row)]); !fault.empty()) {
        return fault;
      }
    }
    std::ranges::sort(wanted);
    const auto distinct = static_cast<std::int32_t>(wanted.size() - std::ranges::unique(wanted).size());
    if ((failed > 0) != (distinct > scene_.slots) || given > at(std::min(distinct, scene_.slots))) {
      return std::to_string(failed) + " without slots, " + std::to_string(given) + " given";
    }
    return maps_->fault(scene_.written.empty() ? kNow : new_row_at(kNow), kMarks);
  }

 private:
  static constexpr std::int32_t kRows = 6;
  static inline const Marks kMarks{.pending = echo_stepped::kPending, .failed = echo_stepped::failed_at(kNow)};

  std::string fault_of(std::int32_t row, std::int32_t slot) const {
    const bool right = slot >= 0 && maps_->host_of[at(slot)] == row && maps_->stamp[at(slot)] >= kNow;
    return right ? "" : "row " + std::to_string(row) + " was told slot " + std::to_string(slot);
  }

  Scene scene_;
  std::unique_ptr<Maps<SteppedLayer>> maps_;
  std::vector<TestBlock> blocks_;
};

/// In all orders with at most so many switches that nobody needs.
void explore(const Scene& scene, int switches) {
  Stage stage(scene);
  Schedules schedules(switches);
  const std::string fault = schedules.explore([&] { return stage.make(); }, [&] { return stage.fault(); });
  EXPECT_EQ(fault, "") << "in run " << schedules.runs();
}

TEST(ResidencySchedules, AHitAndAnEviction) {
  explore({.slots = 2, .resident = {{0, 3}, {1, 4}}, .blocks = {{0}, {2}}}, 5);
}

TEST(ResidencySchedules, AHitInAPoolThatIsFull) {
  explore({.slots = 2, .resident = {{0, 3}, {1, 4}}, .blocks = {{0}, {0}, {2}}}, 3);
}

TEST(ResidencySchedules, ManyMissARow) {
  explore({.slots = 2, .resident = {{0, 3}, {1, 4}}, .blocks = {{2}, {2}, {2}}}, 3);
}

TEST(ResidencySchedules, TheLastFreeSlot) {
  explore({.slots = 3, .resident = {{0, 3}, {1, 4}}, .blocks = {{2}, {3}, {0}}}, 3);
}

TEST(ResidencySchedules, EachWantsWhatTheOtherFetches) {
  explore({.slots = 2, .resident = {{0, 3}, {1, 4}}, .blocks = {{2, 3}, {3, 2}}}, 4);
}

TEST(ResidencySchedules, EachWantsWhatTheOtherEvicts) {
  explore({.slots = 3, .resident = {{0, 3}, {1, 4}, {2, 5}}, .blocks = {{0, 3}, {4}, {0}}}, 3);
}

TEST(ResidencySchedules, APoolThatIsTooSmall) {
  explore({.slots = 2, .resident = {{0, 3}, {1, 4}}, .blocks = {{2}, {3}, {0}}}, 3);
}

TEST(ResidencySchedules, ANewRowThatIsSelectedWhileItIsWritten) {
  explore({.slots = 2, .resident = {{0, 3}, {1, new_row_at(kNow)}}, .blocks = {{1}, {2}}, .written = {1}}, 4);
}

TEST(ResidencySchedules, ANewRowThatIsOnlyWritten) {
  explore({.slots = 2, .resident = {{0, 3}, {1, new_row_at(kNow)}}, .blocks = {{2}}, .written = {1}}, 5);
}

TEST(ResidencySchedules, ARowThatGotNoSlotBefore) {
  explore({.slots = 2, .resident = {{0, 3}}, .blocks = {{2}, {2}}, .failed_before = {2}}, 5);
}

/// Prefetchers of one launch: rows that each wants.
struct Ahead {
  std::int32_t slots;
  std::vector<Seat> resident;
  std::vector<std::vector<std::int32_t>> wanted;
  std::int32_t cap = 100;
};

class AheadStage {
 public:
  explicit AheadStage(const Ahead& scene) : scene_(scene) {}

  Schedules::Threads make() {
    maps_ = std::make_unique<Maps<SteppedLayer>>(scene_.slots, kRows);
    for (const Seat& seat : scene_.resident) {
      maps_->seat(seat.row, seat.tick);
    }
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
  static constexpr std::int32_t kRows = 6;

  Ahead scene_;
  std::unique_ptr<Maps<SteppedLayer>> maps_;
  std::int32_t used_ = 0;
  std::vector<TestPrefetcher> prefetchers_;
};

void explore_ahead(const Ahead& scene, int switches) {
  AheadStage stage(scene);
  Schedules schedules(switches);
  const std::string fault = schedules.explore([&] { return stage.make(); }, [&] { return stage.fault(); });
  EXPECT_EQ(fault, "") << "in run " << schedules.runs();
}

TEST(ResidencySchedules, OneRowAheadForMany) {
  explore_ahead({.slots = 3, .resident = {{0, 3}, {1, 4}}, .wanted = {{2}, {2}, {2}}}, 3);
}

TEST(ResidencySchedules, AheadIntoTheLastFreeSlot) {
  explore_ahead({.slots = 2, .resident = {{0, 3}}, .wanted = {{2, 3}, {3, 4}}}, 4);
}

TEST(ResidencySchedules, AheadOfWhatTheOtherEvicts) {
  explore_ahead({.slots = 2, .resident = {{0, 3}, {1, 4}}, .wanted = {{2, 0}, {1, 3}}}, 4);
}

TEST(ResidencySchedules, AheadIntoAPoolInUse) {
  explore_ahead({.slots = 2, .resident = {{0, kNow}, {1, kNow}}, .wanted = {{2}, {3, 2}}}, 4);
}

TEST(ResidencySchedules, AheadUpToACap) {
  explore_ahead({.slots = 3, .resident = {{0, 3}}, .wanted = {{2, 3}, {4, 2}}, .cap = 1}, 4);
}

TEST(ResidencySchedules, RandomScenesAhead) {
  std::mt19937 engine(2);
  for (int i = 0; i < 60; ++i) {
    Ahead scene{.slots = 1 + static_cast<std::int32_t>(engine() % 3), .resident = {}, .wanted = {}};
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
    explore_ahead(scene, 2);
    ASSERT_FALSE(HasFailure()) << "scene " << i;
  }
}

TEST(ResidencySchedules, RandomScenes) {
  std::mt19937 engine(1);
  for (int i = 0; i < 80; ++i) {
    Scene scene{.slots = 2 + static_cast<std::int32_t>(engine() % 2), .resident = {}, .blocks = {}};
    std::vector<std::int32_t> rows{0, 1, 2, 3, 4, 5};
    std::ranges::shuffle(rows, engine);
    for (std::size_t row = engine() % (at(scene.slots) + 1); row > 0; --row) {
      scene.resident.push_back({.row = rows[row], .tick = 1 + static_cast<std::int32_t>(engine() % 8)});
    }
    scene.blocks.resize(2 + engine() % 2);
    for (std::vector<std::int32_t>& block : scene.blocks) {
      block.resize(1 + engine() % 2);
      std::ranges::generate(block, [&] { return static_cast<std::int32_t>(engine() % 5); });
    }
    explore(scene, 2);
    ASSERT_FALSE(HasFailure()) << "scene " << i;
  }
}

}  // namespace
}  // namespace echo::residency_test
