#pragma once
// What the multiplying warps of score do for sifting, on the way: a score is still in a register when it is compared
// with its row's bound, in small groups while the next product is on its way. Those that pass wait in shared memory, each warp's apart,
// until there are many: then they get places in their rows' lists, with one atomic operation for each row. When the
// share has been scored, one warp lists what is left of all. Those worth fetching also go to a ring of the warp's, from which other warps take them (score_prefetch.cuh); what that is too
// slow for is overwritten. Nobody is waited for, also not by fences, which wait for the scores that a warp has stored.
//
// Bounds come with the queries of a group. That all scores of a row were compared is told by their number, counted
// where they are compared.
// Cost, where nothing passes: a comparison and a vote for each score; of 100K tokens 3 to 4 % pass. At the end of a
// share a barrier, an atomic operation and the stores behind it.

#include "cache_manager/prefetch_rows.cuh"
#include "kernels/prediction.hpp"
#include "kernels/score_stages.cuh"

namespace echo {

inline constexpr int kMostRows = kMostColumns / 32;  ///< of a group
inline constexpr int kRingPlaces = 32;
inline constexpr int kWarpTokens = kTokensPerBlock / kGroupWarps;  ///< of a key block, consecutive, are a warp's

/// A token that is worth fetching.
struct alignas(8) WantedToken {
  std::int32_t row;  ///< of the row block
  std::int32_t position;
};

/// From a multiplying warp to the prefetching ones.
struct WantedRing {
  WantedToken tokens[kRingPlaces];
  std::int32_t put;    ///< so far
  std::int32_t taken;  ///< likewise; by a prefetching warp
};

/// In shared memory, behind it the pending candidates of each multiplying warp.
struct alignas(16) SiftMemory {
  SiftBounds bounds[kBuffers][kMostRows];  ///< of a group's rows, beside its queries
  std::int32_t finished[kMultipliers];     ///< key blocks, by each warpgroup
  std::int32_t fetched;                    ///< whether all key blocks of the share are on their way
  std::int32_t counts[kMultiplierWarps];   ///< at the end: pending candidates
  std::int32_t compared[kMultiplierWarps][kMostRows];  ///< and scores of the last group's rows that were compared
  WantedRing rings[kMultiplierWarps];
  PrefetchShared prefetch[kLoaderWarps];

  /// Before anybody looks; by one warp.
  __device__ void clear() {
    if (lane_index() < kMultiplierWarps) {
      rings[lane_index()].put = rings[lane_index()].taken = 0;
    }
    if (lane_index() < kMultipliers) {
      finished[lane_index()] = 0;
    }
    fetched = 0;
  }
};

/// Candidates of a warp that have no place in a list yet.
template <int kPlaces>
struct PendingTokens {
  ScoredToken tokens[kPlaces];
  std::int32_t rows[kPlaces];  ///< of the row block
};

/// With more rows in a group queries need more of shared memory.
ECHO_HOST_DEVICE constexpr int pending_places(bool one) { return one ? 96 : 64; }
ECHO_HOST_DEVICE constexpr std::int32_t sift_bytes(bool one) {
  const std::size_t pending = one ? sizeof(PendingTokens<pending_places(true)>) : sizeof(PendingTokens<pending_places(false)>);
  return static_cast<std::int32_t>((sizeof(SiftMemory) + kMultiplierWarps * pending + 15) / 16 * 16);
}

__device__ inline SiftMemory& sift_memory(const ScoreStages& shared) {
  return *reinterpret_cast<SiftMemory*>(shared.sift);
}

/// A word of shared memory for others of the block that only look at it now and then.
__device__ inline void show(std::int32_t& word, std::int32_t value) {
  ptx::store_shared(ptx::shared_address(&word), static_cast<std::uint32_t>(value));
}

/// Finds the bounds of a group's rows, a lane each, and puts them down for select, too. By a warp.
__device__ inline void load_bounds(const ScoreParams& p, const GroupRows& rows, SiftBounds* bounds,
                                   const KernelErrorView& errors) {
  const std::int32_t row = rows.first + lane_index();
  if (row < rows.last) {
    const std::int32_t session = p.step.session[row];
    SiftBounds own{float_of(kFloatNan), float_of(kFloatNan)};
    if (session >= 0 && length_of(p, row, errors) > p.shape.top_k) {
      const std::int64_t place = session * p.sift.predicted_stride;
      own = sift_bounds(p.sift.thresholds[place], p.sift.deviations[place]);
    }
    bounds[lane_index()] = own;
    if (own.candidates == own.candidates) {
      RowSift& sift = p.sift.rows[row - p.block.first];
      *reinterpret_cast<uint2*>(&sift.candidates) = make_uint2(ordered_key(own.candidates), ordered_key(own.prefetch));
    }
  }
  __syncwarp();
}

/// Lists candidates of any rows, kTogether of a lane: `row_at(i)` gives the row of the lane's i-th, kNone where there is
/// none, and `token_at(i)` the token.
template <int kTogether, typename RowAt, typename TokenAt>
__device__ void list_candidates(const ScoreParams& p, const RowAt& row_at, const TokenAt& token_at) {
  std::int32_t rows[kTogether];
  std::int32_t places[kTogether];
  unsigned peers[kTogether];  // lanes with candidates of the same row
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    rows[i] = row_at(i);
    peers[i] = __match_any_sync(kAllLanes, rows[i]);
    places[i] = 0;
    if (rows[i] != kNone && rank_in(peers[i]) == 0) {
      places[i] = atomicAdd(&p.sift.rows[rows[i]].found, __popc(peers[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const std::int32_t first = __shfl_sync(kAllLanes, places[i], __ffs(static_cast<int>(peers[i])) - 1);
    const std::int32_t place = first + rank_in(peers[i]);
    if (rows[i] != kNone && place < p.sift.capacity) {
      p.sift.tokens[static_cast<std::int64_t>(rows[i]) * p.sift.capacity + place] = token_at(i);
    }
  }
}

/// A multiplying warp's part in it. Lanes know of rows as in LaneRows, and of one row of the group each. Bounds are in
/// registers where those are not needed for more.
template <int kRows, bool kOne, bool kHasBounds>
class LaneSift {
  static constexpr int kPairs = (kRows + 1) / 2;
  static constexpr int kPlaces = pending_places(kOne);

 public:
  __device__ LaneSift(const ScoreParams& p, const ScoreStages& shared, int warp)
      : p_(p),
        memory_(sift_memory(shared)),
        pending_(reinterpret_cast<PendingTokens<kPlaces>*>(&memory_ + 1)),
        warp_(warp) {
#pragma unroll
    for (float& score : held_) {
      score = float_of(kFloatNan);
    }
  }

  /// Goes to a group. What is held has been looked at.
  __device__ void enter(const GroupQueries& queries, std::int32_t group) {
    if (compared_ != 0) {
      atomicAdd(&p_.sift.rows[first_row_ + lane_index()].compared, compared_);
      compared_ = 0;
    }
    buffer_ = group % kBuffers;
    first_row_ = queries.rows[0];
    const bool sifted = lane_index() < queries.rows[1] &&
                        memory_.bounds[buffer_][lane_index()].candidates == memory_.bounds[buffer_][lane_index()].candidates;
    length_ = sifted ? queries.lengths[lane_index()] : 0;
    if (kHasBounds) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        from_[i] = bounds_of(i).candidates;
      }
    }
  }
  /// Goes to the rows of a product that begins at `row`.
  __device__ void set(std::int32_t row) { row_ = row; }

  /// Takes the lane's score of row i + own of the product, NaN if it is not there, to be looked at later.
  __device__ void hold(int i, float score) { held_[i] = score; }
  /// The position of those, and that no others of the key block follow.
  __device__ void hold_at(std::int32_t position) { position_ = position; }
  /// When all rows of a key block are held or have been looked at.
  __device__ void end_block(std::int32_t token) {
    const std::int32_t first = token + warp_ % kGroupWarps * kWarpTokens;
    compared_ += min(max(length_ - first, 0), kWarpTokens);
    if (warp_ % kGroupWarps == 0 && lane_index() == 0) {
      atomicAdd(&memory_.finished[warp_ / kGroupWarps], 1);
    }
  }

  /// Sees to it that what is held can be pending.
  __device__ void make_room() {
    if (count_ > kPlaces - kWarp) {
      list_pending();
    }
  }
  /// Looks at what is held; there has to be room. Bounds are still those of its rows.
  __device__ void look() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const unsigned lanes = __ballot_sync(kAllLanes, held_[i] >= (kHasBounds ? from_[i] : bounds_of(i).candidates));
      if (lanes != 0U) {
        take(lanes, i);
      }
      held_[i] = float_of(kFloatNan);
    }
  }
  /// When the share is done. By all multiplying warps.
  __device__ void finish();

 private:
  /// Within the group.
  __device__ std::int32_t own(int i) const { return row_ + 2 * i + lane_index() % 4 / 2; }
  /// Rows that are not there have some, too.
  __device__ const SiftBounds& bounds_of(int i) const { return memory_.bounds[buffer_][min(own(i), kMostRows - 1)]; }

  __device__ void take(unsigned lanes, int i) {
    const bool passes = (lanes >> lane_index() & 1U) != 0U;
    const std::int32_t row = own(i);
    PendingTokens<kPlaces>& pending = pending_[warp_];
    if (kPairs > 1) {
      make_room();
    }
    if (passes) {
      const std::int32_t place = count_ + rank_in(lanes);
      pending.tokens[place] = {ordered_key(held_[i]), position_};
      pending.rows[place] = first_row_ + row;
    }
    count_ += __popc(lanes);
    if (p_.sift.prefetch_cap > 0.0F) {
      const bool wanted = passes && held_[i] >= bounds_of(i).prefetch;
      const unsigned wanting = __ballot_sync(kAllLanes, wanted);
      WantedRing& ring = memory_.rings[warp_];
      if (wanted) {
        ring.tokens[(put_ + rank_in(wanting)) % kRingPlaces] = {first_row_ + row, position_};
      }
      put_ += __popc(wanting);
      __syncwarp();
      if (lane_index() == 0) {
        show(ring.put, put_);
      }
    }
  }
  __device__ void list_pending() {
    __syncwarp();
    const PendingTokens<kPlaces>& pending = pending_[warp_];
#pragma unroll 1
    for (std::int32_t at = lane_index(); at - lane_index() < count_; at += kWarp) {  // few registers are free
      list_candidates<1>(
          p_, [&](int) { return at < count_ ? pending.rows[at] : kNone; }, [&](int) { return pending.tokens[at]; });
    }
    __syncwarp();
    count_ = 0;
  }

  const ScoreParams& p_;
  SiftMemory& memory_;
  PendingTokens<kPlaces>* pending_;  ///< of all multiplying warps
  int warp_;
  std::int32_t buffer_ = 0;             ///< that has the group's bounds
  std::int32_t first_row_ = 0;          ///< of the group, in the row block
  std::int32_t row_ = 0;                ///< first of the product, in the group
  std::int32_t count_ = 0;              ///< pending
  std::int32_t put_ = 0;                ///< in the ring
  std::int32_t length_ = 0;             ///< of the lane's row, 0 if it is not sifted
  std::int32_t compared_ = 0;           ///< scores of that row
  std::int32_t position_ = 0;           ///< of what is held
  float held_[kPairs];
  float from_[kPairs] = {};
};

template <int kRows, bool kOne, bool kHasBounds>
__device__ void LaneSift<kRows, kOne, kHasBounds>::finish() {
  constexpr int kTogether = 4;
  make_room();
  look();
  if (lane_index() < kMostRows) {
    memory_.compared[warp_][lane_index()] = compared_;
  }
  if (lane_index() == 0) {
    memory_.counts[warp_] = count_;
  }
  meet(kStart, kMultiplierWarps * kWarp);
  if (warp_ != 0) {
    return;
  }
  std::int32_t compared = 0;
#pragma unroll
  for (int warp = 0; warp < kMultiplierWarps; ++warp) {
    compared += lane_index() < kMostRows ? memory_.compared[warp][lane_index()] : 0;
  }
  const std::int32_t up_to = inclusive_warp_sum(lane_index() < kMultiplierWarps ? memory_.counts[lane_index()] : 0);
  const std::int32_t all = __shfl_sync(kAllLanes, up_to, kWarp - 1);
#pragma unroll 1
  for (std::int32_t from = 0; from < all; from += kTogether * kWarp) {
    std::int32_t warps[kTogether];  // that have the lane's: as many as end at or before it come first
    std::int32_t places[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int32_t at = from + i * kWarp + lane_index();
      warps[i] = at < all ? 0 : kNone;
      places[i] = at;
#pragma unroll
      for (int warp = 0; warp < kMultiplierWarps - 1; ++warp) {
        const std::int32_t end = __shfl_sync(kAllLanes, up_to, warp);
        if (at < all && end <= at) {
          warps[i] = warp + 1;
          places[i] = at - end;
        }
      }
    }
    list_candidates<kTogether>(
        p_, [&](int i) { return warps[i] == kNone ? kNone : pending_[warps[i]].rows[places[i]]; },
        [&](int i) { return pending_[warps[i]].tokens[places[i]]; });
  }
  if (compared != 0) {
    atomicAdd(&p_.sift.rows[first_row_ + lane_index()].compared, compared);
  }
}

}  // namespace echo
