#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

#include "cache_manager/forecast_lists.hpp"
#include "kernels/cuda_handles.hpp"
#include "kernels/launch.hpp"

namespace echo {

/// Forecasts run on two streams beside a pass's: on one rows are found, on the other fetched, for all layers in turn.
/// What must not run beside them joins them first. Works in a stream capture, too: the branches then belong to the
/// graph; what a capture left unjoined never ran and is forgotten.
///
/// They are launched behind the layer's attention, although they follow its recall, so that they get the
/// multiprocessors that attention leaves; and fetching ends with it, so that it is in nobody's way: what has not been
/// fetched by then is left out.
class ForecastBranch {
 public:
  /// Behind what is on the pass's stream.
  void add(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& pass);
  /// Attention over the rows of the pool has been launched.
  void attended(const std::byte* pool, const LaunchContext& pass);

  /// The pass goes on once rows were found: scores may be overwritten.
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
    ForecastLists lists;
  };

  /// Launches what was added, unless it belongs to a capture that is over; false if nothing is left to join.
  bool settle(const LaunchContext& pass);

  Stream find_{first_priority()};
  Stream fetch_{first_priority()};
  Event recalled_;
  Event attended_;
  Event found_;
  Event ended_;
  Event fetched_;
  std::optional<Forecast> added_;        ///< and not launched
  std::vector<const std::byte*> pools_;  ///< added for since the last join
  bool finding_ = false;                 ///< since the last join_found
  unsigned long long capture_ = 0;       ///< in which they were added; 0: none
};

}  // namespace echo
