#pragma once
// Score's list of a row, if it has left one: loaded and judged.

#include <cstddef>

#include "kernels/params.hpp"
#include "kernels/select_memory.cuh"

namespace echo::top_k {

/// What score left for a row, and the row's position. Loads the first tokens before it is known how many there are, and
/// by each lane a word of the rest, so that all is one wait.
struct Sifted {
  static constexpr int kWords = 4;
  static_assert(offsetof(RowSift, found) == 0 && offsetof(RowSift, compared) == 1 * sizeof(std::int32_t));
  static_assert(offsetof(RowSift, candidates) == 2 * sizeof(std::int32_t));

  const ScoredToken* tokens = nullptr;
  ScoredToken early[List::kHeld];
  std::int32_t word = 0;  ///< lane 0 has the position, those behind it the RowSift

  __device__ Sifted(const SiftView& sift, std::int64_t index, bool with_tokens, const std::int32_t* position_at) {
    if (sift.rows != nullptr) {
      tokens = sift.tokens + index * sift.capacity;
#pragma unroll
      for (std::int32_t i = 0; i < List::kHeld; ++i) {
        const std::int32_t at = List::index_of(i);
        early[i] = with_tokens && at < sift.capacity ? tokens[at] : ScoredToken{0U, 0};
      }
    }
    const std::int32_t* at = lane_index() == 0 ? position_at : &sift.rows[index].found + (lane_index() - 1);
    if (lane_index() == 0 || (sift.rows != nullptr && lane_index() < kWords)) {
      word = *at;
    }
  }

  __device__ std::int32_t position() const { return __shfl_sync(kAllLanes, word, 0); }
  __device__ std::int32_t found() const { return __shfl_sync(kAllLanes, word, 1); }  ///< 0 without sifting
  __device__ std::int32_t compared() const { return __shfl_sync(kAllLanes, word, 2); }
  /// Key that no token in the list is below; 0: nothing was compared.
  __device__ std::uint32_t bound() const { return static_cast<std::uint32_t>(__shfl_sync(kAllLanes, word, 3)); }

  /// Whether the tokens have all of the top-k.
  __device__ bool whole(const Row& row, std::int32_t capacity) const {
    const std::int32_t count = found();
    const std::int32_t all = compared();
    const bool bounded = bound() != 0U;
    return bounded && all == row.length && count >= row.k && count <= capacity;
  }

  /// The tokens as a list, for this thread; those that no thread holds go to `entries`.
  __device__ List list(std::int32_t length, std::uint64_t* entries) const {
    List list{.held = {}, .entries = entries, .count = found()};
#pragma unroll
    for (std::int32_t i = 0; i < List::kHeld; ++i) {
      list.held[i] = List::index_of(i) < list.count ? entry(early[i], length) : 0U;
    }
#pragma unroll 1
    for (std::int32_t at = List::index_of(List::kHeld); at < list.count; at += kListThreads) {
      entries[at] = entry(tokens[at], length);
    }
    return list;
  }

 private:
  __device__ static std::uint64_t entry(ScoredToken token, std::int32_t length) {
    return entry_of(token.key, max(0, min(token.position, length - 1)));
  }
};

}  // namespace echo::top_k
