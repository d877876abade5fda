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

}  // namespace echo::bench
