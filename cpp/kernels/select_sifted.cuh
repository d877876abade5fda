#pragma once
// Score's list of a row, if it has left one: loaded and judged.

#include "kernels/params.hpp"
#include "kernels/select_memory.cuh"

namespace echo::top_k {

/// What score left for a row; `found` is 0 without sifting. Loads its first tokens before it is known how many there
/// are, so that all is one wait.
struct Sifted {
  const ScoredToken* tokens = nullptr;
  std::uint64_t bounds = 0;
  std::int32_t compared = 0;
  std::int32_t found = 0;
  ScoredToken early[List::kHeld];

  __device__ Sifted(const SiftView& sift, std::int64_t index, bool with_tokens) {
    if (sift.rows == nullptr) {
      return;
    }
    tokens = sift.tokens + index * sift.capacity;
    const RowSift& row = sift.rows[index];
    bounds = row.bounds;
    compared = row.compared;
    found = row.found;
#pragma unroll
    for (std::int32_t i = 0; i < List::kHeld; ++i) {
      const std::int32_t at = List::index_of(i);
      early[i] = with_tokens && at < sift.capacity ? tokens[at] : ScoredToken{0U, 0};
    }
  }

  /// Whether the tokens have all of the top-k.
  __device__ bool whole(const Row& row, std::int32_t capacity) const {
    return bounds != 0U && compared == row.length && found >= row.k && found <= capacity;
  }

  /// The tokens as a list, for this thread; those that no thread holds go to `entries`.
  __device__ List list(std::int32_t length, std::uint64_t* entries) const {
    List list{.held = {}, .entries = entries, .count = found};
#pragma unroll
    for (std::int32_t i = 0; i < List::kHeld; ++i) {
      list.held[i] = entry(early[i], length);
    }
#pragma unroll 1
    for (std::int32_t at = List::index_of(List::kHeld); at < found; at += kListThreads) {
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
