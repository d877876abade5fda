#pragma once
// Score's list of a row, if it has left one: loaded and judged.

#include "kernels/params.hpp"
#include "kernels/select_memory.cuh"

namespace echo::top_k {

/// What score left for a row. Loads the first tokens before it is known how many there are, so that all is one wait.
struct Sifted {
  static constexpr std::int32_t kEarly = 3;  ///< tokens of a thread: 1.5 k of them for k = 2048

  const ScoredToken* tokens = nullptr;
  std::int32_t found = 0;     ///< 0 without sifting
  std::int32_t compared = 0;  ///< scores
  std::uint32_t bound = 0;    ///< key that no token in the list is below; 0: nothing was compared
  ScoredToken early[kEarly] = {};

  __device__ Sifted(const SiftView& sift, std::int64_t index, bool with_tokens) {
    if (sift.rows == nullptr) {
      return;
    }
    tokens = sift.tokens + index * sift.capacity;
    const RowSift& row = sift.rows[index];
    found = row.found;
    compared = row.compared;
    bound = row.candidates;
    if (with_tokens) {
#pragma unroll
      for (std::int32_t i = 0; i < kEarly; ++i) {
        if (index_of(i) < sift.capacity) {
          early[i] = tokens[index_of(i)];
        }
      }
    }
  }

  /// Whether the tokens have all of the top-k.
  __device__ bool whole(const Row& row, std::int32_t capacity) const {
    return bound != 0U && compared == row.length && found >= row.k && found <= capacity;
  }

  /// The tokens as a list.
  __device__ List list(std::int32_t length, std::uint64_t* entries) const {
#pragma unroll
    for (std::int32_t i = 0; i < kEarly; ++i) {
      if (index_of(i) < found) {
        entries[index_of(i)] = entry(early[i], length);
      }
    }
#pragma unroll 1
    for (std::int32_t at = index_of(kEarly); at < found; at += kListThreads) {
      entries[at] = entry(tokens[at], length);
    }
    return {entries, found};
  }

 private:
  /// Index of a thread's i-th token.
  __device__ static std::int32_t index_of(std::int32_t i) {
    return static_cast<std::int32_t>(threadIdx.x) + i * kListThreads;
  }
  __device__ static std::uint64_t entry(ScoredToken token, std::int32_t length) {
    return entry_of(token.key, max(0, min(token.position, length - 1)));
  }
};

}  // namespace echo::top_k
