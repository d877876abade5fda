#pragma once
// The same world on the CPU and on the GPU, and the fixture of tests that need one.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "cuda_world.hpp"

namespace echo::cuda_test {

inline RuntimeConfig kernels_of(const char* which) {
  RuntimeConfig config;
  config.kernels = which;
  return config;
}
/// With the kernels made for the GPU's architecture, and with those for any.
inline RuntimeConfig own_kernels() { return kernels_of("auto"); }
inline RuntimeConfig generic_kernels() { return kernels_of("generic"); }

/// The same world on the CPU and on the GPU.
struct Pair {
  Pair(const ShapeView& shape, const Sizes& sizes, const RuntimeConfig& config = generic_kernels())
      : cpu_backend(make_cpu_backend(1)),
        gpu_backend(make_cuda_backend(0, config)),
        cpu(*cpu_backend, shape, sizes),
        gpu(*gpu_backend, shape, sizes) {}

  template <typename Call>
  void both(Call call) {
    call(cpu);
    call(gpu);
  }

  /// Each is whole, and host rows, index keys and numbers of entries and new rows are equal.
  void expect_same_results() {
    cpu.check();
    gpu.check();
    EXPECT_EQ(gpu.host_pool(), cpu.host_pool());
    EXPECT_EQ(gpu.index_keys.read(), cpu.index_keys.read());
    EXPECT_EQ(gpu.counted().appended, cpu.counted().appended);
    EXPECT_EQ(gpu.counted().hits + gpu.counted().misses, cpu.counted().hits + cpu.counted().misses);
  }
  /// And, where nothing was ever evicted, the same rows are resident.
  void expect_same_state() {
    expect_same_results();
    EXPECT_EQ(cpu.counted().evictions, 0);
    EXPECT_EQ(gpu.counted().evictions, 0);
    EXPECT_EQ(gpu.counted().misses, cpu.counted().misses);
    EXPECT_EQ(gpu.resident_rows(), cpu.resident_rows());
  }

  std::unique_ptr<Backend> cpu_backend;
  std::unique_ptr<Backend> gpu_backend;
  World cpu;
  World gpu;
};

/// Skips where no GPU can be used.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) {
      GTEST_SKIP() << "no CUDA device, or a build without the CUDA backend";
    }
  }
};

}  // namespace echo::cuda_test
