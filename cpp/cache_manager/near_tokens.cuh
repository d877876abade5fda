#pragma once
// Tokens that just missed the selection of a batch entry, and of them those whose rows are not resident: what a
// forecast looks at, by most of a thread block.
//
// They are in the list that select has left (select_near.cuh), in no order, with what it has selected; that is resident
// by now, and drops out with all else that is. Bins of distances from the k-th key say which of the others are the
// best. Distances are those of ordered keys, which any scale of scores leaves fine enough. The list of a short row may
// have all its tokens: then bins say first which of them are near at all (forecast_reach). Cost: four accesses that
// depend on each other, each for all of a thread's tokens at once, and two barriers.

#include "cache_manager/residency.cuh"
#include "kernels/near_lists.hpp"
#include "kernels/number_formats.hpp"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr int kNearThreads = 512;  ///< the first ones of a block
inline constexpr int kNearBarrier = 2;    ///< theirs
inline constexpr int kNearEach = kMostNear / kNearThreads;
/// Keys below the k-th by their distance from it, finer where it is small: eight bins for each power of two.
inline constexpr std::int32_t kNearBins = 8 * kWarp;

__device__ inline std::int32_t near_bin(std::uint32_t below) {
  if (below < 8U) {
    return static_cast<std::int32_t>(below);
  }
  const int top = 31 - __clz(static_cast<int>(below));
  return 8 * (top - 2) + static_cast<std::int32_t>(below >> (top - 3) & 7U);
}

/// The first distance behind a bin.
__device__ inline std::uint32_t end_of_near_bin(std::int32_t bin) {
  const std::int32_t next = bin + 1;
  return next < 8 ? static_cast<std::uint32_t>(next) : static_cast<std::uint32_t>(8 + next % 8) << (next / 8 - 1);
}

/// The bin that the best of a histogram reach into.
struct NearEdge {
  std::int32_t bin;
  std::int32_t rest;  ///< of its tokens, how many
};

/// Where the `wanted` best end; behind all bins if there are fewer. By each warp that asks.
__device__ inline NearEdge find_near_edge(const std::int32_t* histogram, std::int32_t wanted) {
  constexpr int kEach = kNearBins / kWarp;
  std::int32_t bins[kEach];
  std::int32_t own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    bins[i] = histogram[lane_index() * kEach + i];
    own += bins[i];
  }
  const std::int32_t up_to = inclusive_warp_sum(own);
  std::int32_t before = up_to - own;
  const unsigned here = __ballot_sync(kAllLanes, before < wanted && wanted <= up_to);
  if (here == 0U) {
    return {.bin = kNearBins, .rest = 0};
  }
  NearEdge edge{.bin = lane_index() * kEach, .rest = 0};
  bool found = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    found = found || before + bins[i] >= wanted;
    before += found ? 0 : bins[i];
    edge.bin += found ? 0 : 1;
  }
  edge.rest = wanted - before;
  const int lane = __ffs(static_cast<int>(here)) - 1;
  return {.bin = __shfl_sync(kAllLanes, edge.bin, lane), .rest = __shfl_sync(kAllLanes, edge.rest, lane)};
}

/// Zero before.
struct NearShared {
  std::int32_t ranked[kNearBins];   ///< tokens below the k-th by their distance
  std::int32_t missing[kNearBins];  ///< those whose rows are not resident
  std::int32_t at_edge;             ///< of the last bin that counts, those that were asked for
};

/// A thread's share of an entry's near tokens. All threads call all functions.
class NearTokens {
 public:
  /// `row` of the pass speaks for the entry.
  __device__ NearTokens(const ForecastParams& p, const NearLists& near, std::int32_t row)
      : row_(row), kth_(p.kth_score[row]) {
    const std::int32_t index = row - p.block.first;
    listed_ = near.counts[index];
    const ScoredToken* tokens = near.tokens + static_cast<std::int64_t>(index) * kMostNear;
    std::uint32_t keys[kNearEach];
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {  // before it is known how many there are
      const ScoredToken token = tokens[threadIdx.x + static_cast<unsigned>(i * kNearThreads)];
      keys[i] = token.key;
      places_[i] = token.position;
    }
    const std::uint32_t kth_key = ordered_key(kth_);
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      // What is not a finite way below the k-th score is no likelier than anything else.
      const bool listed = static_cast<std::int32_t>(threadIdx.x) + i * kNearThreads < listed_;
      const bool below = listed && isfinite(kth_) && value_of_key(keys[i]) > -3.0e38F && keys[i] <= kth_key;
      places_[i] = below ? places_[i] : kNone;
      set_bin(i, below ? near_bin(kth_key - keys[i]) : 0);
    }
  }

  /// Leaves the missing rows, if there are many tokens of those within `reach` ranks only, and of them the `wanted`
  /// best.
  __device__ void choose(const ForecastParams& p, std::int32_t wanted, NearShared& shared,
                         const KernelErrorView& errors) {
    std::int32_t last_bin = kNearBins;
    if (listed_ > 2 * p.shape.top_k) {
      add_to(shared.ranked);
      meet(kNearBarrier, kNearThreads);
      last_bin = find_near_edge(shared.ranked, forecast_reach(p.shape.top_k)).bin;
    }
    look_up(p, last_bin, errors);
    add_to(shared.missing);
    meet(kNearBarrier, kNearThreads);
    const NearEdge best = find_near_edge(shared.missing, wanted);
    std::int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      own += places_[i] != kNone && bin(i) == best.bin ? 1 : 0;
    }
    std::int32_t place = place_in_block(own, shared.at_edge);
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      const bool chosen = bin(i) < best.bin || (bin(i) == best.bin && place < best.rest);
      place += places_[i] != kNone && bin(i) == best.bin ? 1 : 0;
      places_[i] = chosen ? places_[i] : kNone;
    }
  }

  /// Leaves those that nobody else fetches, and lists them behind the `listed` there are. Returns how far the last of
  /// this thread's is below the k-th score at most, 0 if it has none.
  __device__ float claim(const LayerView& layer, std::int32_t* rows, std::int32_t& listed) {
    std::int32_t before[kNearEach];
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      before[i] = kNone;
      if (places_[i] != kNone) {  // leaves in before what there was
        slot_word(layer, places_[i]).compare_exchange_strong(before[i], kPending, cuda::memory_order_relaxed);
      }
    }
    std::int32_t own = 0;
    std::int32_t last = kNone;
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      places_[i] = before[i] == kNone ? places_[i] : kNone;
      own += places_[i] != kNone ? 1 : 0;
      last = max(last, places_[i] != kNone ? bin(i) : kNone);
    }
    std::int32_t place = place_in_block(own, listed);
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      if (places_[i] != kNone) {
        rows[place++] = places_[i];
      }
    }
    const std::uint32_t key = ordered_key(kth_);
    return last == kNone ? 0.0F : score_distance(kth_, value_of_key(key - min(end_of_near_bin(last) - 1U, key)));
  }

 private:
  static constexpr int kBinBits = 8;
  static constexpr int kBinsPerWord = 32 / kBinBits;
  static_assert(kNearBins == 1 << kBinBits);

  __device__ std::int32_t bin(int i) const {
    return static_cast<std::int32_t>(bins_[i / kBinsPerWord] >> (i % kBinsPerWord * kBinBits) & (kNearBins - 1));
  }
  __device__ void set_bin(int i, std::int32_t bin) {
    bins_[i / kBinsPerWord] |= static_cast<std::uint32_t>(bin) << (i % kBinsPerWord * kBinBits);
  }

  /// The place of the first of a thread's `own` among those of all threads, in no order; `all` counts them.
  __device__ static std::int32_t place_in_block(std::int32_t own, std::int32_t& all) {
    const std::int32_t up_to = inclusive_warp_sum(own);
    std::int32_t first = 0;
    if (lane_index() == kWarp - 1 && up_to > 0) {
      first = atomicAdd(&all, up_to);
    }
    return __shfl_sync(kAllLanes, first, kWarp - 1) + up_to - own;
  }
  __device__ void add_to(std::int32_t* histogram) const {
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      if (places_[i] != kNone) {
        atomicAdd(histogram + bin(i), 1);
      }
    }
  }
  /// Positions become host rows that are not resident. Those that the pass appends have slots.
  __device__ void look_up(const ForecastParams& p, std::int32_t last_bin, const KernelErrorView& errors) {
    const std::int32_t* table = block_table_of(p.step, row_);
    const std::int32_t tokens = p.step.table_stride * kTokensPerBlock;
    bool bad = false;
    std::int32_t blocks[kNearEach];
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      const bool within = places_[i] >= 0 && places_[i] < tokens && bin(i) <= last_bin;
      blocks[i] = within ? table[places_[i] / kTokensPerBlock] : kNone;
      places_[i] = within ? places_[i] : kNone;
    }
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      const bool right = blocks[i] >= 0 && blocks[i] < p.layer.host_rows / kTokensPerBlock;
      bad = bad || (places_[i] != kNone && !right);
      places_[i] = right ? host_row(blocks + i, places_[i] % kTokensPerBlock) : kNone;
    }
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      blocks[i] = places_[i] == kNone ? 0 : slot_word(p.layer, places_[i]).load(cuda::memory_order_relaxed);
    }
#pragma unroll
    for (int i = 0; i < kNearEach; ++i) {
      places_[i] = blocks[i] == kNone ? places_[i] : kNone;
    }
    if (bad) {
      errors.raise(KernelError::bad_position);
    }
  }

  std::int32_t row_;
  float kth_;
  std::int32_t listed_;             ///< tokens of the list
  std::int32_t places_[kNearEach];  ///< positions, then host rows; kNone: not wanted
  std::uint32_t bins_[kNearEach / kBinsPerWord] = {};
};

}  // namespace echo
