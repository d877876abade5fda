// What is allocated is what the plan lists: counted where memory comes from, not asked of the plan.

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "runtime/device_state.hpp"
#include "runtime/host_pool.hpp"

namespace echo {
namespace {

/// Counts bytes and pieces by name.
class CountingMemory final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, const std::string& what) override {
    ++pieces[what];
    total += static_cast<std::int64_t>(bytes);
    return std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  }
  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    total -= static_cast<std::int64_t>(bytes);
    std::free(pointer);
  }
  void* device_alias(void* pointer) override { return pointer; }

  std::map<std::string, std::int64_t> pieces;
  std::int64_t total = 0;
};

/// Memory and nothing else: construction must call no verb.
class MemoryBackend final : public Backend {
 public:
  const std::string& device() const override { return name_; }
  MemoryResource& host_memory() override { return host; }
  MemoryResource& device_memory() override { return on_device; }
  void use_stream(std::uintptr_t) override {}
  void copy_to_device(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill(void* to, int byte, std::size_t bytes) override { std::memset(to, byte, bytes); }
  void upload_control(void*, const void*, std::size_t) override { ADD_FAILURE(); }
  void begin(const BeginParams&) override { ADD_FAILURE(); }
  void append(const AppendParams&) override { ADD_FAILURE(); }
  void score(const ScoreParams&) override { ADD_FAILURE(); }
  void select(const SelectParams&) override { ADD_FAILURE(); }
  void recall(const RecallParams&) override { ADD_FAILURE(); }
  void attend(const AttendParams&) override { ADD_FAILURE(); }
  void commit(const CommitParams&) override { ADD_FAILURE(); }
  void release(std::span<const LayerView>, std::span<const RowRun>) override { ADD_FAILURE(); }
  void synchronize() override {}
  std::function<void()> capture(const std::function<void()>& body) override { return body; }

  CountingMemory host;
  CountingMemory on_device;

 private:
  std::string name_ = "cpu";
};

void expect_all_listed(const std::string& prefetch) {
  RuntimeConfig config;
  config.prefetch = prefetch;
  config.device = "cpu";
  config.host_tokens = 1000;
  config.gpu_slots = 700;
  config.query_rows = 2;
  config.max_batch = 3;
  config.host_row_stride = 2560;
  const Plan plan = make_plan(ModelShape::tiny(), config);
  const auto backend = std::make_shared<MemoryBackend>();
  {
    const HostPool pool(backend, plan);
    const DeviceState state(backend, plan, pool);
    EXPECT_EQ(backend->host.total, plan.total(MemoryPlace::host));
    EXPECT_EQ(backend->on_device.total, plan.total(MemoryPlace::device));
    std::map<std::string, std::int64_t> pieces = backend->on_device.pieces;
    pieces.insert(backend->host.pieces.begin(), backend->host.pieces.end());
    for (const MemoryItem& item : plan.items) {
      EXPECT_EQ(pieces[item.name], item.count) << item.name;
      pieces.erase(item.name);
    }
    EXPECT_TRUE(pieces.empty()) << pieces.begin()->first << " is not in the plan";
  }
  EXPECT_EQ(backend->host.total, 0);
  EXPECT_EQ(backend->on_device.total, 0);
}

TEST(Plan, ListsWhatIsAllocatedAndNothingElse) { expect_all_listed("off"); }

TEST(Plan, ListsWhatSiftingTakes) {
  expect_all_listed("on");
  RuntimeConfig config;
  config.max_batch = 3;
  config.query_rows = 2;
  ModelShape shape = ModelShape::tiny();
  for (const auto& [top_k, capacity] : {std::pair{1, 1024}, {341, 1024}, {342, 1088}, {2048, 6144}}) {
    shape.top_k = top_k;
    const Plan plan = make_plan(shape, config);
    EXPECT_EQ(plan.sift_capacity, capacity);
    EXPECT_EQ(plan.bytes_of("sift_rows"), 2 * 6 * 16);
    EXPECT_EQ(plan.bytes_of("candidates"), 6 * capacity * 8);
    EXPECT_EQ(plan.bytes_of("prefetched"), 8);
  }
}

TEST(Plan, ForecastsAreATenthOfTopKWhereTheyCanBe) {
  RuntimeConfig config;
  EXPECT_EQ(config.forecast_cap, 0);
  config.forecast_cap = -1;
  ModelShape shape = ModelShape::tiny();
  shape.top_k = 2048;
  const auto planned = [&] { return make_plan(shape, config, {}).config.forecast_cap; };
  config.device = "cpu";
  EXPECT_EQ(planned(), 0);
  config.device = "cuda:0";
  EXPECT_EQ(planned(), 204);
  config.kernels = "generic";
  EXPECT_EQ(planned(), 0);
  config.forecast_cap = 65536;
  EXPECT_EQ(planned(), 1024) << "as many as are asked for, of those that a forecast looks at";
  shape.top_k = 4;
  config.kernels = "auto";
  config.forecast_cap = -1;
  EXPECT_EQ(planned(), 1);
}

}  // namespace
}  // namespace echo
