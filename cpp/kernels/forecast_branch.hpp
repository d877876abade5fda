#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cache_manager/forecast_lists.hpp"
#include "kernels/cuda_handles.hpp"
#include "kernels/launch.hpp"
#include "kernels/near_lists.hpp"

namespace echo {

/// Forecasts run on two streams beside a pass's: on one rows are found, on the other fetched, for all layers in turn.
/// What must not run beside them joins them first. Works in a stream capture, too: the branches then belong to the
/// graph; what a capture left unjoined never ran and is forgotten.
///
/// They are launched behind the layer's attention, once its blocks have begun, although they follow its recall: they
/// get the multiprocessors that attention leaves, and none of its blocks waits for one. Fetching goes on beside the
/// next score; what has not been fetched when the next select begins is left out.
class ForecastBranch {
 public:
  /// Behind what is on the pass's stream.
  void add(const ForecastParams& params, const NearLists& near, const ForecastLists& lists, const LaunchContext& pass);
  /// The event that an attention over the rows of the pool is to record when all its blocks have begun; null: none.
  cudaEvent_t attention_begun(const std::byte* pool) const;
  /// Attention over the rows of the pool has been launched, leaves so many multiprocessors, and records that event.
  void attended(const std::byte* pool, int left, bool records, const LaunchContext& pass);

  /// ForecastLists::ended of what is being fetched and has not been told to end; null: nothing.
  std::int32_t* fetching(const LaunchContext& pass);
  /// Somebody sets that.
  void ending() { fetching_.reset(); }

  /// The pass goes on once rows were found: what select left, scores and k-th scores may be overwritten.
  void join_found(const LaunchContext& pass);
  /// Once all is done.
  void join(const LaunchContext& pass);
  /// Once all is done, if some of it is the pool's.
  void join_pool(const std::byte* pool, const LaunchContext& pass);
  /// Waits for what was launched; never throws.
  void retire() noexcept;

 private:
  struct Forecast {
    ForecastParams params;
    NearLists near;
    ForecastLists lists;
    bool begun = false;       ///< its attention records the event
    int left = kForecastSms;  ///< multiprocessors
  };

  /// Launches what was added, unless it belongs to a capture that is over; false if nothing is left to join.
  bool settle(const LaunchContext& pass);

  Stream find_;
  Stream fetch_{first_priority()};
  Event recalled_;
  Event begun_;
  Event passed_;
  Event found_;
  Event ended_;
  Event fetched_;
  std::optional<Forecast> added_;          ///< and not launched
  std::optional<ForecastLists> fetching_;  ///< and nobody ends it
  std::vector<const std::byte*> pools_;    ///< added for since the last join
  bool finding_ = false;                   ///< since the last join_found
  unsigned long long capture_ = 0;         ///< in which they were added; 0: none
};

}  // namespace echo
