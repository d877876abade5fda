#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "reference/memory_resource.hpp"
#include "reference/simd_level.hpp"
#include "reference/thread_pool.hpp"
#include "runtime/backend.hpp"

namespace echo {

/// Runs every verb at once, on the calling thread and those of a pool. The oracle for other
/// backends and the default where there is no GPU. Its results do not depend on the number of
/// threads, nor (except for the exp of libm in attend) on the CPU.
class CpuBackend final : public Backend {
 public:
  /// `threads` 0 means one per core.
  explicit CpuBackend(std::int64_t threads, SimdLevel level = usable_simd_levels().back());

  const std::string& device() const override { return device_; }
  MemoryResource& host_memory() override { return memory_; }
  MemoryResource& device_memory() override { return memory_; }

  bool sifts() const override { return true; }
  bool forecasts() const override { return true; }

  void use_stream(std::uintptr_t stream) override;
  void copy_to_device(void* device, const void* host, std::size_t bytes) override;
  void copy_to_host(void* host, const void* device, std::size_t bytes) override;
  void fill(void* device, int byte, std::size_t bytes) override;
  void upload_control(void* device, const void* host, std::size_t bytes) override;

  void begin(const BeginParams& params) override;
  void append(const AppendParams& params) override;
  void score(const ScoreParams& params) override;
  void select(const SelectParams& params) override;
  void recall(const RecallParams& params) override;
  void forecast(const ForecastParams& params) override;
  void attend(const AttendParams& params) override;
  void commit(const CommitParams& params) override;
  void release(std::span<const LayerView> layers, std::span<const RowRun> rows) override;

  void synchronize() override {}
  std::function<void()> capture(const std::function<void()>& body) override { return body; }

 private:
  std::string device_ = "cpu";
  PlainMemory memory_;
  ThreadPool pool_;
  SimdLoops loops_;
};

}  // namespace echo
