#pragma once
// In how many parts attention takes a selection, where nobody says: chosen once, from the model and the largest step,
// never from a batch, since bits depend on it. It is the same on every device, so that a runtime's plan does not depend
// on where it is made.
//
// attend_cluster has clusters of as many blocks as there are parts. Few parts keep few multiprocessors busy in a small
// step; many parts cost time to be put together, and clusters leave multiprocessors over. Where there are more queries
// than clusters, each gets an equal part of all tiles; a query that two of them have is handed over (mla_stretch.hpp).
// What is minimised is the cycles of the cluster of an H200 that has most to do.

#include <algorithm>
#include <cstdint>

#include "echo/model_shape.hpp"

namespace echo {

namespace attention_splits {

/// As measured on an H200.
struct Choice {
  std::int64_t splits;
  std::int64_t clusters;  ///< that run at once
};
inline constexpr Choice kChoices[] = {{1, 132}, {2, 66}, {4, 30}, {8, 15}};
inline constexpr std::int64_t kTileCycles = 8400;     ///< of 128 selected rows
inline constexpr std::int64_t kItemCycles = 8600;     ///< to put the parts of a query together
inline constexpr std::int64_t kHandingCycles = 8000;  ///< to hand over one query and to take over another
inline constexpr std::int64_t kAnyway = 4;            ///< parts where the choice makes little difference
inline constexpr std::int64_t kLeastSelected = 1024;  ///< rows, for it to make one

}  // namespace attention_splits

/// For steps of up to `rows` query rows.
inline std::int64_t chosen_attention_splits(const ModelShape& shape, std::int64_t rows) {
  using namespace attention_splits;
  if (shape.top_k < kLeastSelected) {
    return kAnyway;
  }
  const auto groups_of = [](std::int64_t count, std::int64_t size) { return (count + size - 1) / size; };
  const std::int64_t items = rows * groups_of(shape.query_heads, 64);
  const auto cycles = [&](const Choice& choice) {
    const std::int64_t tiles = groups_of(shape.top_k, choice.splits * 128);
    const std::int64_t clusters = std::min(choice.clusters, items);
    return groups_of(items * tiles, clusters) * kTileCycles + groups_of(items, clusters) * kItemCycles +
           (items % clusters == 0 ? 0 : kHandingCycles);
  };
  return std::ranges::min_element(kChoices, {}, cycles)->splits;
}

}  // namespace echo
