#pragma once
// Score's list of a row, if it has left one: loaded, judged, and taken over into the list in shared memory.

#include "kernels/params.hpp"
#include "kernels/select_memory.cuh"

namespace echo::top_k {

/// What score left for a row; `found` is 0 without sifting. Loads its first tokens before it is known how many there
/// are, so that all is one wait.
struct Sifted {
  static constexpr std::int32_t kEarly = 8;  ///< of a thread

  const ScoredToken* tokens = nullptr;
  std::uint64_t bounds = 0;
  std::int32_t compared = 0;
  std::int32_t found = 0;
  ScoredToken early[kEarly];

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
    for (std::int32_t i = 0; i < kEarly; ++i) {
      const std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + i * kListThreads;
      early[i] = with_tokens && at < sift.capacity ? tokens[at] : ScoredToken{0U, 0};
    }
  }

  /// Whether the tokens have all of the top-k.
  __device__ bool whole(const Row& row, std::int32_t capacity) const {
    return bounds != 0U && compared == row.length && found >= row.k && found <= capacity;
  }

  /// Lists the tokens and counts them by coarse bins.
  __device__ void list(std::int32_t length, std::uint64_t* entries, std::int32_t* histogram) const {
    const auto bound = static_cast<std::uint32_t>(bounds);
#pragma unroll
    for (std::int32_t i = 0; i < kEarly; ++i) {
      const std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + i * kListThreads;
      if (at < found) {
        entries[at] = entry(early[i], length);
        atomicAdd(histogram + coarse_bin(early[i].key - bound), 1);
      }
    }
#pragma unroll 1
    for (std::int32_t at = static_cast<std::int32_t>(threadIdx.x) + kEarly * kListThreads; at < found;
         at += kListThreads) {
      entries[at] = entry(tokens[at], length);
      atomicAdd(histogram + coarse_bin(tokens[at].key - bound), 1);
    }
  }

 private:
  __device__ static std::uint64_t entry(ScoredToken token, std::int32_t length) {
    return entry_of(token.key, max(0, min(token.position, length - 1)));
  }
};

}  // namespace echo::top_k
