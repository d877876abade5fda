#pragma once
// What the benchmark is asked for, as it crosses the C API.

#include <cstdint>

namespace echo::bench {

inline constexpr std::int32_t kLayers = 61;           ///< calls of a graph, each with its own state and slab
inline constexpr std::int32_t kTopK = 2048;           ///< entries of a selection
inline constexpr std::int32_t kNewTokens = 64;        ///< that a session may get in a case with new rows
inline constexpr std::int32_t kMostTokens = 160'000;  ///< of a session: its bitmaps fit into shared memory

extern "C" struct EchoBenchCase {
  std::int32_t batch;       ///< sessions of a call
  std::int32_t misses;      ///< per call, spread over the sessions
  std::int32_t row_bytes;   ///< 656 or 1152
  std::int32_t pool_slots;  ///< of each layer
  std::int32_t length;      ///< tokens of each session
  std::int32_t new_rows;    ///< 1: each call appends a token of each session
  std::int32_t released;    ///< tokens of one session more, which is not in the batch and is released; 0: none
};

/// What a replay times.
enum class Kind : std::int32_t {
  recall,         ///< the call as it is
  without_copy,   ///< with rows of no bytes: all of it but the copy
  gather_sorted,  ///< as many fresh rows by a plain gather, in order of address
  gather_random,  ///< and in random order
  released,       ///< recall, behind the release of a session
};

inline constexpr std::int32_t kStepTokens = 128;  ///< that a session may get in a case of steps

/// Decode steps; `length` holds the new tokens, too.
extern "C" struct EchoStepCase {
  std::int32_t layers;
  std::int32_t batch;
  std::int32_t length;     ///< tokens of each session
  std::int32_t row_bytes;  ///< 656 or 1152
  std::int32_t pool_slots;
  std::int32_t new_rows;         ///< 1: each step appends a token of each session
  std::int32_t splits;           ///< of attention; 0: those of a runtime for this batch
  std::int32_t without_offload;  ///< 1: all rows lie in device memory, too (one session)
  std::int32_t forecast_cap;     ///< rows that are fetched for the next step, for each session; 0: none
};

/// What a replay of a step runs, between begin and commit. Each part contains the ones before it.
enum class StepPart : std::int32_t {
  nothing,
  score,
  select,
  recall,           ///< with appended rows
  attend,           ///< the whole step
  without_offload,  ///< the whole step, but rows are where they belong and nothing is recalled
  gather,           ///< instead of all that: what is missing, by a plain gather in order of address
};

extern "C" struct EchoStepReplay {
  std::int32_t part;
  std::int32_t misses;  ///< per layer, spread over the sessions; -1: as the scores and the replays before have it
  std::int32_t sift;    ///< 1: score lists candidates for select
  float prefetch_cap;   ///< as in SiftView; needs sift
  std::int32_t blocks;  ///< grid of a gather
};

/// Of one replay; counts are sums over all layers.
extern "C" struct EchoStepResult {
  double microseconds;
  std::int64_t nodes;  ///< of the graph
  std::int64_t hits;
  std::int64_t misses;
  std::int64_t evictions;
  std::int64_t lost_races;
  std::int64_t candidates;
  std::int64_t full_selects;
  std::int64_t prefetched;
  std::int64_t prefetched_used;
  std::int64_t prefetches_capped;
  std::int64_t natural_misses;  ///< of the selection in the pools that the replay before left
  std::int64_t forecast;
  std::int64_t forecast_used;
};

}  // namespace echo::bench
