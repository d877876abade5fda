#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench_case.hpp"
#include "control.hpp"
#include "draw.hpp"
#include "host_rows.hpp"
#include "kernels/cuda_handles.hpp"
#include "layers.hpp"
#include "timed_graph.hpp"

namespace echo::bench {

/// One case, its pools full of random rows: a graph of kLayers calls that is replayed with fresh random misses.
class RecallCase {
 public:
  /// Throws InvalidArgument naming the field, CapacityError.
  RecallCase(const EchoBenchCase& sizes, HostRows& host);
  ~RecallCase();

  /// Prepares and runs the graph once; returns its time in microseconds. `blocks`: grid of a gather.
  /// Throws StateError if the calls did not have exactly the misses that they should have.
  double replay(Kind kind, std::int32_t blocks);

  /// Nodes of the graph of a kind, once it has been replayed.
  int nodes(Kind kind) const;

  /// Right after a replay that recalls: looks at all maps, at the slots of the selections and, until the first replay
  /// without copy, at the bytes of all slots and new host rows. StateError says what is wrong.
  void verify();

 private:
  /// What one pass selects.
  struct Pass {
    std::vector<Entry> entries;
    bool new_rows;
    bool timed;  ///< with scores, and with lists of what is missing
  };
  struct Captured {
    std::unique_ptr<TimedGraph> graph;
    std::int32_t blocks = 0;
  };

  LaunchContext context() const { return {.stream = stream_.get(), .multiprocessors = 0, .errors = {}}; }
  bool appends(Kind kind) const { return sizes_.new_rows != 0 && kind == Kind::recall; }
  /// Position of a session's last token.
  std::int32_t last_position(std::int32_t session) const;
  /// `misses` spread over the sessions [first, end), whose selections are filled up with hits, or with nothing.
  std::vector<Entry> spread(std::int32_t first, std::int32_t end, std::int64_t misses, bool with_hits) const;

  void begin(const Pass& pass);
  void prepare(const Pass& pass);
  RecallParams params(std::int32_t layer, std::int32_t rows) const;
  /// A pass outside of any graph: random rows of the sessions [first, end) that are not resident become so.
  void make_resident(std::int32_t first, std::int32_t end, std::int64_t rows);
  void fill_pools();
  /// The session outside of the batch gets its share of the pools, in full and anew.
  void renew_released_session();
  RowRun released_rows() const { return control_.rows_of(sizes_.batch); }

  TimedGraph& graph(Kind kind, std::int32_t blocks);
  void call(Kind kind, std::int32_t layer, std::int32_t blocks);
  void check_counts(const std::vector<LayerCounters>& before) const;
  void check_pools();
  void check_new_host_rows() const;

  EchoBenchCase sizes_;
  HostRows& host_;
  Stream stream_;  // outlives the backend, which works on it
  std::unique_ptr<Backend> backend_;
  ShapeView shape_;
  Control control_;
  Layers layers_;
  std::int64_t layer_entries_;  ///< of the selections of one layer
  std::uint32_t seed_ = 0;
  std::int32_t new_tokens_ = 0;  ///< that each session has got
  Kind last_ = Kind::gather_sorted;
  bool bytes_valid_ = true;  ///< the pools hold what the maps say
  Buffer selection_;
  Buffer slots_;
  Buffer missing_;
  Buffer shuffled_;
  Buffer scores_;
  Buffer kth_score_;
  Buffer kv_;
  Buffer gathered_;
  Buffer other_data_;   ///< touched between replays
  Buffer draw_failed_;  ///< one word, and one that nobody reads
  TimeEvent start_;
  TimeEvent stop_;
  std::array<Captured, 5> graphs_;  ///< by kind
};

}  // namespace echo::bench
