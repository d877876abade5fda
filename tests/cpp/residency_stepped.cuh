#pragma once
// residency.cuh for threads that a schedule runs one memory access at a time (schedules.hpp), and blocks of a launch
// on top of it. Orders are those of sequential consistency; what weaker memory adds is left to the GPU.

#include <gtest/gtest.h>

#include <cuda/atomic>

#include <memory>
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
#include "residency_maps.cuh"

namespace echo_stepped {

/// The functions above are found by this type of their argument.
struct SteppedLayer : LayerView {};

}  // namespace echo_stepped

namespace echo::residency_test {

using echo_stepped::SteppedLayer;

inline constexpr std::int32_t kNow = 9;
inline constexpr std::int32_t kSceneRows = 6;

struct NoPause {
  void operator()() const {}
};
inline constexpr NoPause kNoPause;

struct Seat {
  std::int32_t row;
  std::int32_t tick;
};

/// Maps of so many slots, with rows in some of them.
inline std::unique_ptr<Maps<SteppedLayer>> seated(std::int32_t slots, const std::vector<Seat>& resident) {
  auto maps = std::make_unique<Maps<SteppedLayer>>(slots, kSceneRows);
  for (const Seat& seat : resident) {
    maps->seat(seat.row, seat.tick);
  }
  return maps;
}

/// Runs a scene in all orders with at most so many switches that nobody needs.
template <typename Stage>
void explore_orders(Stage stage, int switches) {
  Schedules schedules(switches);
  const std::string fault = schedules.explore([&] { return stage.make(); }, [&] { return stage.fault(); });
  EXPECT_EQ(fault, "") << "in run " << schedules.runs();
}

}  // namespace echo::residency_test
