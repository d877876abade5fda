#pragma once
// What the multiplying warps of score do for sifting, on the way: a score is still in a register when it is compared
// with its row's bound. Those that pass wait in shared memory, each warp's apart, until there are many, or the share
// has been scored: then they get places in their rows' lists, with one atomic operation for each row. Those worth
// fetching also go to a ring of the warp's, from which another warp takes them (score_prefetch.cuh); what that is too
// slow for is overwritten. Nobody is waited for, also not by fences, which wait for the scores that a warp has stored.
//
// Bounds come with the queries of a group. That all scores of a row were compared is told by their number: whoever
// loads the bounds of a run adds its scores, with one atomic operation for each row. Cost: a comparison and a vote for
// each score; of 100K tokens 2 to 4 % pass. At the end of a share an atomic operation and the stores behind it. On an
// H200 1.5 us in all for 32K tokens of one session, 2.4 for 13 x 100K.

#include "cache_manager/prefetch_rows.cuh"
#include "kernels/prediction.hpp"
#include "kernels/score_runs.cuh"
#include "kernels/score_stages.cuh"

namespace echo {

inline constexpr int kMostRows = kMostColumns / 32;  ///< of a group
inline constexpr int kRingPlaces = 32;

/// A token that is worth fetching.
struct alignas(8) WantedToken {
  std::int32_t row;  ///< of the row block
  std::int32_t position;
};

/// From a multiplying warp to the prefetching one.
struct WantedRing {
  WantedToken tokens[kRingPlaces];
  std::int32_t put;  ///< so far

  // In one access each: a warp may look at a place that another is writing.
  __device__ void set(std::int32_t place, const WantedToken& token) {
    *reinterpret_cast<uint2*>(tokens + place % kRingPlaces) =
        make_uint2(static_cast<unsigned>(token.row), static_cast<unsigned>(token.position));
  }
  __device__ WantedToken look_at(std::int32_t place) const {
    const uint2 words = ptx::load_shared_volatile_pair(ptx::shared_address(&tokens[place % kRingPlaces]));
    return {static_cast<std::int32_t>(words.x), static_cast<std::int32_t>(words.y)};
  }
};

/// In shared memory, behind it the pending candidates of each multiplying warp.
struct alignas(16) SiftMemory {
  SiftBounds bounds[kBuffers][kMostRows];  ///< of a group's rows, beside its queries
  std::int32_t finished[kMultipliers];     ///< key blocks, by each warpgroup
  std::int32_t fetched;                    ///< whether all key blocks of the share are on their way
  WantedRing rings[kMultiplierWarps];

  /// Before anybody looks; by one warp.
  __device__ void clear() {
    if (lane_index() < kMultiplierWarps) {
      rings[lane_index()].put = 0;
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

/// How many a warp has places for, where products have so many rows, and `one` may do for a group. With more rows in a
/// group queries need more of shared memory; with one there is room for all that most warps find in a share.
ECHO_HOST_DEVICE constexpr int pending_places(int rows, bool one) { return one ? (rows == 1 ? 256 : 96) : 64; }
template <int kRows, bool kOne>
ECHO_HOST_DEVICE constexpr std::int32_t sift_bytes() {
  constexpr std::size_t kBytes = sizeof(PendingTokens<pending_places(kRows, kOne)>);
  return static_cast<std::int32_t>((sizeof(SiftMemory) + kMultiplierWarps * kBytes + 15) / 16 * 16);
}

__device__ inline SiftMemory& sift_memory(const ScoreStages& shared) {
  return *reinterpret_cast<SiftMemory*>(shared.sift);
}

/// A word of shared memory for others of the block that only look at it now and then.
__device__ inline void show(std::int32_t& word, std::int32_t value) {
  ptx::store_shared(ptx::shared_address(&word), static_cast<std::uint32_t>(value));
}

/// Of a run's rows, a lane each.
struct RunBounds {
  SiftBounds bounds;
  std::int32_t scores;  ///< that will be compared with them
};

/// Finds them. By a warp.
__device__ inline RunBounds find_bounds(const ScoreParams& p, const Run& run, const KernelErrorView& errors) {
  RunBounds own{.bounds = {float_of(kFloatNan), float_of(kFloatNan)}, .scores = 0};
  const std::int32_t row = run.rows.first + lane_index();
  if (row < run.rows.last) {
    const std::int32_t session = p.step.session[row];
    const std::int32_t length = length_of(p, row, errors);
    if (session >= 0 && length > p.shape.top_k) {
      const std::int64_t place = session * p.sift.predicted_stride;
      own = {.bounds = sift_bounds(p.sift.thresholds[place], p.sift.deviations[place]),
             .scores = run.tokens_of(length)};
    }
  }
  return own;
}

/// Puts them down for the multiplying warps, which ask for what is a margin above the bound of prefetch
/// (RunMaker::prefetch_margin), and for select with the number of scores. By a warp.
__device__ inline void put_bounds(const ScoreParams& p, const Run& run, const RunBounds& own, float margin,
                                  SiftBounds* bounds) {
  const std::int32_t row = run.rows.first + lane_index();
  if (row < run.rows.last) {
    const auto [candidates, prefetch] = own.bounds;
    bounds[lane_index()] = {candidates, prefetch + margin * (prefetch - candidates)};
    if (candidates == candidates) {
      RowSift& sift = p.sift.rows[row - p.block.first];
      *reinterpret_cast<uint2*>(&sift.candidates) = make_uint2(ordered_key(candidates), ordered_key(prefetch));
      atomicAdd(&sift.compared, own.scores);
    }
  }
  __syncwarp();
}

/// A multiplying warp's part in it. Lanes know of rows as in LaneRows, and of one row of the group each.
template <int kRows, bool kOne>
class LaneSift {
  static constexpr int kPairs = (kRows + 1) / 2;
  static constexpr int kPlaces = pending_places(kRows, kOne);
  static constexpr bool kOneRow = kOne && kRows == 1;  ///< of each group: pending tokens of a row stand together

 public:
  __device__ LaneSift(const ScoreParams& p, const ScoreStages& shared, int warp)
      : p_(p),
        memory_(sift_memory(shared)),
        pending_(reinterpret_cast<PendingTokens<kPlaces>*>(&memory_ + 1)[warp]),
        warp_(warp) {}

  /// Goes to a group.
  __device__ void enter(const GroupQueries& queries, std::int32_t group) {
    bounds_ = memory_.bounds[group % kBuffers];
    first_row_ = queries.rows[0];
    if (kOne) {
      set(0);
    }
  }
  /// Goes to the rows of a product that begins at `row`.
  __device__ void set(std::int32_t row) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      from_[i] = bounds_[min(own(row, i), kMostRows - 1)].candidates;
    }
  }

  /// Looks at the lane's score of row i + own of a product that begins at `row`, if it is there.
  __device__ void look(std::int32_t row, int i, bool there, float score, std::int32_t position) {
    const bool passes = there && score >= from_[i];
    const unsigned lanes = __ballot_sync(kAllLanes, passes);
    if (lanes != 0U) {
      take(lanes, passes, score, position, own(row, i));
    }
  }
  /// When all rows of a key block have been looked at.
  __device__ void end_block() {
    ++finished_;
    if (p_.sift.prefetch_cap > 0.0F && warp_ % kGroupWarps == 0 && lane_index() == 0) {
      show(memory_.finished[warp_ / kGroupWarps], finished_);
    }
  }
  /// When the share is done.
  __device__ void finish() {
    if constexpr (kOneRow) {
      const std::int32_t from = list_rows(first_row_);
      list_row(first_row_, from, count_ - from);
    } else {
      list_pending<kPlaces / kWarp>();
    }
  }

 private:
  /// Within the group.
  __device__ static std::int32_t own(std::int32_t row, int i) { return row + 2 * i + lane_index() % 4 / 2; }

  __device__ void take(unsigned lanes, bool passes, float score, std::int32_t position, std::int32_t row) {
    if (count_ > kPlaces - kWarp) [[unlikely]] {
      if constexpr (kOneRow) {  // short code: it lies in the loop over key blocks
        list_rows(kNone);
      } else {
        list_pending<1>();
      }
    }
    if (passes) {
      const std::int32_t place = count_ + rank_in(lanes);
      pending_.tokens[place] = {ordered_key(score), position};
      pending_.rows[place] = first_row_ + row;
    }
    count_ += __popc(lanes);
    if (p_.sift.prefetch_cap > 0.0F) {
      const bool wanted = passes && score >= bounds_[row].prefetch;
      const unsigned wanting = __ballot_sync(kAllLanes, wanted);
      if (wanting == 0U) {
        return;
      }
      WantedRing& ring = memory_.rings[warp_];
      if (wanted) {
        ring.set(put_ + rank_in(wanting), {first_row_ + row, position});
      }
      put_ += __popc(wanting);
      __syncwarp();
      if (lane_index() == 0) {
        show(ring.put, put_);
      }
    }
  }
  /// Lists what is pending, so many of a lane at once.
  template <int kTogether>
  __device__ void list_pending();
  /// With kOneRow, lists what is pending up to the tokens of a row, and returns where these begin: with one atomic
  /// operation for each row.
  __device__ std::int32_t list_rows(std::int32_t up_to);
  /// Lists pending tokens [from, from + tokens), all of a row.
  __device__ void list_row(std::int32_t row, std::int32_t from, std::int32_t tokens) const;

  const ScoreParams& p_;
  SiftMemory& memory_;
  PendingTokens<kPlaces>& pending_;
  int warp_;
  const SiftBounds* bounds_ = nullptr;  ///< of the group
  std::int32_t first_row_ = 0;          ///< of the group, in the row block
  std::int32_t count_ = 0;              ///< pending
  std::int32_t put_ = 0;                ///< in the ring
  std::int32_t finished_ = 0;           ///< key blocks
  float from_[kPairs] = {};
};

template <int kRows, bool kOne>
template <int kTogether>
__device__ void LaneSift<kRows, kOne>::list_pending() {
  static_assert(kPlaces % (kTogether * kWarp) == 0);
  __syncwarp();
#pragma unroll 1
  for (std::int32_t from = 0; from < count_; from += kTogether * kWarp) {
    std::int32_t rows[kTogether];
    std::int32_t places[kTogether];
    unsigned peers[kTogether];  // lanes with candidates of the same row
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int32_t at = from + i * kWarp + lane_index();
      rows[i] = at < count_ ? pending_.rows[at] : kNone;
      peers[i] = __match_any_sync(kAllLanes, rows[i]);
      places[i] = 0;
      if (rows[i] != kNone && rank_in(peers[i]) == 0) {
        places[i] = atomicAdd(&p_.sift.rows[rows[i]].found, __popc(peers[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int32_t first = __shfl_sync(kAllLanes, places[i], __ffs(static_cast<int>(peers[i])) - 1);
      const std::int32_t place = first + rank_in(peers[i]);
      if (rows[i] != kNone && place < p_.sift.capacity) {
        p_.sift.tokens[static_cast<std::int64_t>(rows[i]) * p_.sift.capacity + place] =
            pending_.tokens[from + i * kWarp + lane_index()];
      }
    }
  }
  __syncwarp();
  count_ = 0;
}

template <int kRows, bool kOne>
__device__ void LaneSift<kRows, kOne>::list_row(std::int32_t row, std::int32_t from, std::int32_t tokens) const {
  std::int32_t place = lane_index() == 0 && tokens > 0 ? atomicAdd(&p_.sift.rows[row].found, tokens) : 0;
  place = __shfl_sync(kAllLanes, place, 0);
  ScoredToken* list = p_.sift.tokens + static_cast<std::int64_t>(row) * p_.sift.capacity + place;
#pragma unroll 1
  for (std::int32_t i = 0; i < tokens; i += kWarp) {
    const std::int32_t own = i + lane_index();
    if (own < tokens && place + own < p_.sift.capacity) {
      list[own] = pending_.tokens[from + own];
    }
  }
}

template <int kRows, bool kOne>
__device__ std::int32_t LaneSift<kRows, kOne>::list_rows(std::int32_t up_to) {
  __syncwarp();
  std::int32_t from = 0;
#pragma unroll 1
  while (from < count_) {
    const std::int32_t row = pending_.rows[from];
    if (row == up_to) {
      return from;
    }
    std::int32_t tokens = 0;
#pragma unroll 1
    for (std::int32_t i = 0; i < count_ - from; i += kWarp) {
      const std::int32_t at = from + i + lane_index();
      tokens += __popc(__ballot_sync(kAllLanes, at < count_ && pending_.rows[at] == row));
    }
    list_row(row, from, tokens);
    from += tokens;
  }
  __syncwarp();
  count_ = 0;
  return 0;
}

}  // namespace echo
