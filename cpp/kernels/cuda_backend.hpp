#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attend_sm90.hpp"
#include "kernels/cuda_handles.hpp"
#include "kernels/device_memory.hpp"
#include "kernels/forecast_branch.hpp"
#include "kernels/kernel_errors.hpp"
#include "kernels/launch.hpp"
#include "kernels/pinned_memory.hpp"
#include "kernels/scratch.hpp"
#include "kernels/select_cluster.hpp"
#include "kernels/staging_ring.hpp"
#include "runtime/backend.hpp"

namespace echo {

/// Runs every verb as kernels on a stream. Verbs only launch: they neither wait nor allocate, so
/// they can be captured into a graph. What kernels find wrong is thrown by the next synchronize()
/// or upload_control().
class CudaBackend final : public Backend {
 public:
  /// The device has to be current; `own_kernels` allows those made for its architecture. Throws NotSupported if this
  /// build has no code for it.
  CudaBackend(int device, bool own_kernels);
  ~CudaBackend() override;

  const std::string& device() const override { return name_; }
  MemoryResource& host_memory() override { return pinned_memory_; }
  MemoryResource& device_memory() override { return device_memory_; }

  void prepare(const ScratchSizes& sizes) override;

  bool sifts() const override { return score_sm90_; }
  std::size_t row_alignment() const override { return sizeof(std::uint32_t); }
  std::size_t score_alignment() const override { return score_sm90_ ? 16 : 1; }
  std::size_t attend_alignment() const override { return attend_sm90_.teams > 0 ? 16 : 1; }
  /// Select leaves what they look at, if it is the kernel with clusters. Known after prepare.
  bool forecasts() const override { return select_cluster_.usable(); }

  /// Until called, the backend works on a stream of its own. Later calls come after earlier ones on
  /// any stream, unless the new stream is being captured: then whoever captures it has to wait
  /// first. A stream has to live until the next use_stream.
  void use_stream(std::uintptr_t stream) override;

  void copy_to_device(void* device, const void* host, std::size_t bytes) override;
  void copy_to_host(void* host, const void* device, std::size_t bytes) override;
  void fill(void* device, int byte, std::size_t bytes) override;
  void read_counters(void* host, const void* device, std::size_t bytes) override;
  void upload_control(void* device, const void* host, std::size_t bytes) override;

  void begin(const BeginParams& params) override;
  void append(const AppendParams& params) override;
  void score(const ScoreParams& params) override;
  void select(const SelectParams& params) override;
  void recall(const RecallParams& params) override;
  /// On streams of its own, until what may not run beside it is called, or commit.
  void forecast(const ForecastParams& params) override;
  void attend(const AttendParams& params) override;
  void commit(const CommitParams& params) override;
  void release(std::span<const LayerView> layers, std::span<const RowRun> rows) override;

  void unbroken(bool on) override {
    unbroken_ = on;
    follows_ = false;
  }

  void synchronize() override;
  void wait() override;
  void retire() noexcept override;
  std::uint64_t mark() override;
  bool done(std::uint64_t mark) override;
  /// The replay works on the stream that is in use then.
  std::function<void()> capture(const std::function<void()>& body) override;

 private:
  /// `waits`: for a kernel that waits for the one before by itself.
  LaunchContext context(bool waits = false) {
    const bool follows = std::exchange(follows_, unbroken_);
    return {stream_, multiprocessors_, errors_.view(), early_launches_ && follows && waits};
  }
  /// For what is ordered with the pass and launches nothing on its stream.
  LaunchContext pass() const { return {stream_, multiprocessors_, errors_.view()}; }
  /// The working memory. StateError before prepare, and InvalidArgument where a call exceeds what
  /// was prepared for.
  const Scratch& scratch() const;
  const Scratch& scratch_for(const LayerView& layer, std::int32_t rows, std::int32_t block_rows) const;
  /// What verbs that touch rows ask of them.
  void check_rows(const LayerView& layer, std::int32_t rows, std::int32_t block_rows, const void* kv,
                  DType kv_dtype) const;
  /// The layers in device memory, until this is called with others.
  const LayerView* on_device(std::span<const LayerView> layers);
  /// For a kernel that does not sift.
  void clear_next_sift(const ScoreParams& params);
  /// One copy, or several where the host side is pinned in chunks.
  void copy(void* to, const void* from, std::size_t bytes, const void* host, cudaMemcpyKind kind);

  int device_;
  bool own_kernels_;
  std::string name_;
  int multiprocessors_ = 0;
  bool early_launches_ = false;  ///< whether the device can do that
  bool unbroken_ = false;
  bool follows_ = false;  ///< the launch before was a verb's
  Stream own_stream_;
  cudaStream_t stream_;
  Stream counter_stream_;  ///< beside the steps
  Event switched_;         ///< what is on the stream that use_stream leaves
  ForecastBranch forecasts_;
  DeviceMemory device_memory_;
  PinnedMemory pinned_memory_;
  KernelErrors errors_;
  StagingRing staging_;
  std::optional<Scratch> scratch_;
  bool score_sm90_ = false;                  ///< which kernel scores
  SelectClusterPlan select_cluster_;         ///< how select runs, if it can run that way
  bool near_left_ = false;                   ///< the last one left its lists, if forecasts have memory for them
  AttendSm90Plan attend_sm90_;               ///< how attend runs, if it can run that way
  std::vector<LayerView> layers_on_device_;  ///< what lies in the scratch for begin and release
  std::deque<Event> marks_;                  ///< those not known to be done, oldest first
  std::uint64_t marks_done_ = 0;
};

}  // namespace echo
