#pragma once

#include <cstdint>
#include <vector>

#include "echo/export.hpp"

namespace echo {

/// Counters of one layer's GPU pool since construction.
struct LayerStats {
  std::int64_t hits = 0;               ///< entries of selections for which nothing had to be fetched
  std::int64_t misses = 0;             ///< selected rows that a recall fetched
  std::int64_t evictions = 0;          ///< slots that were taken from another row
  std::int64_t appended = 0;           ///< rows of new tokens written (slot and host)
  std::int64_t lost_races = 0;         ///< hits whose row was just being fetched for another entry
  std::int64_t recalled_bytes = 0;     ///< of the rows fetched
  std::int64_t candidates = 0;         ///< tokens that a score listed for its select
  std::int64_t full_selects = 0;       ///< query rows whose candidates did not do: all scores were searched
  std::int64_t prefetched = 0;         ///< rows fetched while scoring; not among the misses
  std::int64_t prefetched_used = 0;    ///< of them: selected in the same step
  std::int64_t prefetched_wasted = 0;  ///< of them: not selected in that step
  std::int64_t prefetches_capped = 0;  ///< rows and tokens dropped for the cap, or a full queue; where it is full
                                       ///< on a GPU, rows that others were fetching count, too
  std::int64_t prefetched_bytes = 0;   ///< of the rows prefetched
  std::int64_t forecast = 0;           ///< rows fetched for the next step; not among the misses
  std::int64_t forecast_used = 0;      ///< of them: selected in a later step, while they were still there
  std::int64_t forecast_wasted = 0;    ///< of them: not used so far
  std::int64_t forecast_bytes = 0;     ///< of the rows forecast
  std::int64_t used_slots = 0;         ///< slots that hold a row now
};

struct ECHO_API RuntimeStats {
  std::vector<LayerStats> layers;
  std::int64_t steps = 0;  ///< decode steps done
  std::int64_t prefill_tokens = 0;
  std::int64_t sessions = 0;  ///< open now
  std::int64_t free_host_tokens = 0;
  std::int64_t host_tokens = 0;
  std::int64_t device_bytes = 0;  ///< allocated at construction
  std::int64_t host_bytes = 0;
  std::int64_t row_bytes = 0;

  /// Bytes that recalls fetched from the host, over all layers; prefetches and forecasts come on top.
  std::int64_t recalled_bytes() const;
  /// Bytes that were prefetched, over all layers.
  std::int64_t prefetched_bytes() const;
  /// Bytes that were forecast, over all layers.
  std::int64_t forecast_bytes() const;
  /// hits / (hits + misses) over all layers; 1 if nothing was selected yet.
  double hit_rate() const;
};

}  // namespace echo
