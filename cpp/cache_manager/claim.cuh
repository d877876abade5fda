#pragma once
// Making host rows resident takes three launches, and nothing but the launches orders them:
//   lookup  stamps the slots of rows that are resident and marks the others in a bitmap of host rows; marking is what
//           finds duplicates, whoever comes first
//   claim   reads the marked rows off in order, gives each a slot from the clock hand on and updates the maps
//   copy    moves bytes (recall) or new rows are encoded (append)
// Each launch either only reads the maps or is one block that alone writes them, so a row cannot be
// evicted between being found and being used, no row gets two slots, and the outcome does not
// depend on timing.

#include <cstdint>

#include "cache_manager/layer_view.hpp"

namespace echo {

struct Miss {
  std::int32_t host_row;
  std::int32_t slot;
};

/// What the launches of one claim hand on. All zero between claims, but for `missing`.
struct ClaimState {
  std::int32_t entries;        ///< entries that name a host row
  std::int32_t wanted;         ///< host rows that were marked
  std::int32_t stamped;        ///< slots that got the current tick
  std::int32_t aged[kWindow];  ///< of those, how many had a tick of this residue, within the window
  std::int32_t missing;        ///< rows that got a slot, in `misses`
};

/// Working memory of a claim, shared by all layers. The bitmaps are all zero between claims.
struct ClaimView {
  std::uint32_t* wanted;   ///< bit r of word r / 32: host row r is selected and not resident
  std::uint32_t* summary;  ///< bit w of word w / 32: word w of `wanted` is not zero
  std::int32_t summary_words;
  std::int32_t most_misses;
  Miss* misses;  ///< [most_misses] in order of host row
  ClaimState* state;
};

inline constexpr std::int32_t kRowsPerSummaryWord = 32 * 32;

}  // namespace echo
