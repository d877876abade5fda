// The protocol of residency.cuh in every order of a few threads' memory accesses, up to a number of switches between
// them: what threads of the CPU meet once in a million calls is met here every time. Blocks of a recall, and the warps
// that write new rows beside them.

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "residency_stepped.cuh"

namespace echo::residency_test {
namespace {

using TestBlock = Block<SteppedLayer, NoPause>;

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
    maps_ = seated(scene_.slots, scene_.resident);
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
    std::vector<int> fetched(kSceneRows, 0);
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
  static inline const Marks kMarks{.pending = echo_stepped::kPending, .failed = echo_stepped::failed_at(kNow)};

  std::string fault_of(std::int32_t row, std::int32_t slot) const {
    const bool right = slot >= 0 && maps_->host_of[at(slot)] == row && maps_->stamp[at(slot)] >= kNow;
    return right ? "" : "row " + std::to_string(row) + " was told slot " + std::to_string(slot);
  }

  Scene scene_;
  std::unique_ptr<Maps<SteppedLayer>> maps_;
  std::vector<TestBlock> blocks_;
};

void explore(const Scene& scene, int switches) { explore_orders(Stage(scene), switches); }

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
