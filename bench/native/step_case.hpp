#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "bench_case.hpp"
#include "control.hpp"
#include "host_rows.hpp"
#include "kernels/cuda_handles.hpp"
#include "layers.hpp"
#include "timed_graph.hpp"

namespace echo::bench {

/// Decode steps of a batch of sessions of the same length, through the verbs of the backend with the GPU's own kernels,
/// in the order of ForwardPass::attention. Each replay is prepared so that scores select, in each layer, just so many
/// rows that are not resident. Everything differs from layer to layer: keys, queries, rows, pools.
class StepCase {
 public:
  /// Throws InvalidArgument naming the field, CapacityError.
  StepCase(const EchoStepCase& sizes, HostRows& host);
  ~StepCase();

  /// Prepares and runs the graph of a part of the step once. Throws StateError if the calls did not have the misses
  /// that they should have; some more there may be, one for each row that got a slot before anything was selected.
  EchoStepResult replay(const EchoStepReplay& what);

  /// Right after a replay of a whole step or of one up to recall: looks at selections, maps and bytes, and compares
  /// what came out of attention with what the rows of the host give. StateError says what is wrong.
  void verify();

 private:
  using GraphKey = std::tuple<StepPart, std::int32_t, float, std::int32_t>;

  LaunchContext context() const { return {.stream = stream_.get(), .multiprocessors = 0, .errors = {}}; }
  std::int32_t entries() const { return sizes_.batch * kTopK; }
  bool whole_pools() const { return sizes_.pool_slots >= control_.host_rows(); }
  std::int32_t position() const;
  BlockView block() const { return {.first = 0, .count = sizes_.batch, .tick_offset = 0}; }
  StepView step() const { return control_.step(sizes_.batch); }
  const LayerView& view(std::int32_t layer) const { return layers_.views()[static_cast<std::size_t>(layer)]; }
  LayerView view_without_offload(std::int32_t layer) const;

  // What the verbs are called with.
  ScoreParams score_params(std::int32_t layer, const SiftView& sift) const;
  SelectParams select_params(std::int32_t layer, const SiftView& sift, std::int32_t* selection, float* kth) const;
  RecallParams recall_params(std::int32_t layer) const;
  ForecastParams forecast_params(std::int32_t layer) const;
  AttendParams attend_params(std::int32_t layer) const;
  /// Whether begin gives slots to new rows.
  bool claims(const EchoStepReplay& what) const {
    return sizes_.new_rows != 0 && static_cast<StepPart>(what.part) < StepPart::without_offload;
  }
  bool forecasts() const { return sizes_.forecast_cap > 0; }
  /// Whether score sifts: if asked to, and if the backend does. Nobody else would fill what select is shown.
  bool sifts(const EchoStepReplay& what) const { return what.sift != 0 && backend_->sifts(); }
  SiftView sift_view(std::int32_t layer, const EchoStepReplay& what) const;
  const std::uint16_t* kv_of(std::int32_t layer) const;

  void fill_inputs();
  void fill_pools();
  /// Entries of the next pass: misses spread over the sessions, and rows that come in besides.
  std::vector<Entry> spread(std::int64_t misses, std::int64_t more) const;
  /// Leaves the caches as a step with so many misses finds them, and lists what it is to miss. Returns what had to be
  /// fetched for that, all layers together: how much selections change. -1: leaves them as they are.
  std::int64_t prepare(std::int32_t misses);
  std::int64_t all_misses() const;
  void displace_and_refill(std::int32_t misses, bool new_rows);
  void call(const EchoStepReplay& what, std::int32_t layer);
  TimedGraph& graph(const EchoStepReplay& what);
  void check_draw() const;
  EchoStepResult counted(const EchoStepReplay& what, const std::vector<LayerCounters>& before) const;

  void check_selections() const;
  void check_pools() const;
  void check_outputs() const;

  EchoStepCase sizes_;
  HostRows& host_;
  Stream stream_;  // outlives the backend, which works on it
  std::unique_ptr<Backend> backend_;
  ShapeView shape_;
  Control control_;
  Layers layers_;
  std::int32_t splits_;
  std::uint32_t time_ = 0;
  std::int32_t new_tokens_ = 0;  ///< that each session has got
  StepPart last_ = StepPart::nothing;
  Buffer selection_;  ///< [layers, batch, kTopK] of the replay
  Buffer expected_;   ///< the same of its preparation
  Buffer slots_;      ///< of the replay
  Buffer coming_;
  Buffer missing_;  ///< [layers, misses] host rows
  Buffer prepared_slots_;
  Buffer scores_;  ///< of one layer, as a runtime has them
  Buffer kth_score_;
  Buffer prepared_kth_;
  Buffer thresholds_;
  Buffer deviations_;
  Buffer index_key_;  ///< inputs of all layers
  Buffer index_q_;
  Buffer index_weights_;
  Buffer kv_;
  Buffer q_;
  Buffer out_;
  Buffer sift_rows_;  ///< two, which layers use in turns
  Buffer sift_tokens_;
  Buffer prefetched_;
  Buffer rows_without_offload_;  ///< all rows of all layers, where they fit
  Buffer gathered_;
  Buffer other_data_;  ///< touched between replays
  Buffer words_;       ///< result of the draw, and a word that nobody reads
  TimeEvent start_;
  TimeEvent stop_;
  std::map<GraphKey, std::unique_ptr<TimedGraph>> graphs_;
};

}  // namespace echo::bench
