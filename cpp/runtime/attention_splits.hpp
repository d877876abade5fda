#pragma once
// In how many parts attention takes a selection, where nobody says: chosen once, from the model and the largest step,
// never from a batch, since bits depend on it. It is the same on every device, so that a runtime's plan does not depend
// on where it is made.
//
// attend_sm90 gives each part a block. Few parts keep few multiprocessors busy in a small step; many parts cost time
// to be put together. Where there are more queries than teams of blocks, each gets an equal part of all tiles; a query
// that two of them have is handed over. What is minimised is the cycles of a team of an H200. More than 16 parts would
// make a step of one row faster by 13 percent, as was measured, but prefill, which has as many, take twice as long,
// by this count.

#include <algorithm>
#include <cstdint>

#include "echo/model_shape.hpp"

namespace echo {

namespace attention_splits {

// As measured on an H200.
/// At once, of 132: in a layer, a launch of 130 (13 sessions, 5 splits) made it 0.4 to 1 us longer than one of 104 (4
/// splits).
inline constexpr std::int64_t kBlocks = 128;
inline constexpr std::int64_t kHalfCycles = 4600;       ///< of 64 selected rows
inline constexpr std::int64_t kItemCycles = 18'000;     ///< to begin a query, and to put its parts together
inline constexpr std::int64_t kHandingCycles = 13'500;  ///< to hand over one query and to take over another
inline constexpr std::int64_t kMost = 16;               ///< parts
inline constexpr std::int64_t kAnyway = 4;              ///< parts where the choice makes little difference
inline constexpr std::int64_t kLeastSelected = 1024;    ///< rows, for it to make one

}  // namespace attention_splits

/// For steps of up to `rows` query rows.
inline std::int64_t chosen_attention_splits(const ModelShape& shape, std::int64_t rows) {
  using namespace attention_splits;
  if (shape.top_k < kLeastSelected) {
    return kAnyway;
  }
  const auto groups_of = [](std::int64_t count, std::int64_t size) { return (count + size - 1) / size; };
  const std::int64_t items = rows * groups_of(shape.query_heads, 64);
  std::int64_t best = 1;
  std::int64_t least = 0;
  for (std::int64_t splits = 1; splits <= kMost; ++splits) {
    const std::int64_t halves = groups_of(groups_of(shape.top_k, 64), splits);
    const std::int64_t teams = std::min(items, kBlocks / splits);
    const std::int64_t each = teams == items ? halves : groups_of(items * groups_of(halves, 2) * 2, teams);
    const std::int64_t cycles =
        each * kHalfCycles + groups_of(items, teams) * kItemCycles + (items % teams == 0 ? 0 : kHandingCycles);
    if (splits == 1 || cycles < least) {
      best = splits;
      least = cycles;
    }
  }
  return best;
}

}  // namespace echo
