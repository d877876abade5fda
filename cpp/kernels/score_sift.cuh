#pragma once
// What the multiplying warps of score do for sifting, on the way: a score is still in a register when it is compared
// with its row's bound. Those that pass wait in shared memory, each warp's apart, until there are many, or the share
// has been scored: then they get places in their rows' lists, with one atomic operation for each row. Those worth
// fetching also go to a ring of the warp's, from which another warp takes them (score_prefetch.cuh); what that is too
// slow for is overwritten. Nobody is waited for, also not by fences, which wait for the scores that a warp has stored.
//
// Bounds come with the queries of a group. That all scores of a row were compared is told by their number, counted
// where they are compared.
// Cost: a comparison and a vote for each score; of 100K tokens 2 to 4 % pass. At the end of a share an atomic operation
// and the stores behind it. On an H200 1.9 us in all, for 32K tokens of one session as for 13 x 100K.

#include "cache_manager/prefetch_rows.cuh"
#include "kernels/prediction.hpp"
#include "kernels/score_stages.cuh"

namespace echo {

inline constexpr int kMostRows = kMostColumns / 32;  ///< of a group
inline constexpr int kRingPlaces = 32;
inline constexpr int kBoundsThreads = (kMultiplierWarps + 1) * kWarp;  ///< that meet at kBounds

/// Host rows worth having, from a multiplying warp to the one that lists what is missing.
struct WantedRing {
  std::int32_t rows[kRingPlaces];
  std::int32_t put;  ///< so far
  // What the warp itself seldom needs.
  std::int32_t host_block;  ///< that it looks at
  std::int32_t first_row;   ///< of its group, in the row block
  std::int32_t buffer;      ///< that has the group's bounds
};

/// Of a warpgroup; of the rows of its group a lane each.
struct SiftCounts {
  std::int32_t finished;            ///< key blocks
  std::int32_t lengths[kMostRows];  ///< 0 of a row that is not sifted
  std::int32_t compared[kMostRows];
};

/// At the end of a share, of each row of its last group.
struct SiftEnd {
  std::int32_t found[kMostRows];  ///< pending candidates of all warps
  std::int32_t first[kMostRows];  ///< place of the first of them in the row's list
};

/// In shared memory, behind it the pending candidates of each multiplying warp.
struct alignas(16) SiftMemory {
  SiftBounds bounds[kBuffers][kMostRows];  ///< of a group's rows, beside its queries
  std::int32_t fetched;                    ///< whether all key blocks of the share are on their way
  WantedRing rings[kMultiplierWarps];
  SiftCounts counts[kMultipliers];
  SiftEnd end;

  /// Before anybody looks; by one warp.
  __device__ void clear() {
    if (lane_index() < kMultiplierWarps) {
      rings[lane_index()].put = 0;
    }
    if (lane_index() < kMultipliers) {
      counts[lane_index()].finished = 0;
    }
    if (lane_index() < kMostRows) {
      end.found[lane_index()] = 0;
      for (SiftCounts& own : counts) {
        own.compared[lane_index()] = 0;
      }
    }
    fetched = 0;
  }
};

/// Candidates of a warp that have no place in a list yet.
template <int kPlaces>
struct PendingTokens {
  ScoredToken tokens[kPlaces];
  std::int32_t rows[kPlaces];  ///< of the warp's group
};

/// With more rows in a group queries need more of shared memory.
ECHO_HOST_DEVICE constexpr int pending_places(bool one) { return one ? 96 : 64; }
ECHO_HOST_DEVICE constexpr std::int32_t sift_bytes(bool one) {
  const std::size_t pending =
      one ? sizeof(PendingTokens<pending_places(true)>) : sizeof(PendingTokens<pending_places(false)>);
  return static_cast<std::int32_t>((sizeof(SiftMemory) + kMultiplierWarps * pending + 15) / 16 * 16);
}

__device__ inline SiftMemory& sift_memory(const ScoreStages& shared) {
  return *reinterpret_cast<SiftMemory*>(shared.sift);
}

/// A word of shared memory for others of the block that only look at it now and then.
__device__ inline void show(std::int32_t& word, std::int32_t value) {
  ptx::store_shared(ptx::shared_address(&word), static_cast<std::uint32_t>(value));
}

/// Finds the bounds of a group's rows, a lane each, and puts them down for select, too. By a warp. `lists`: tokens
/// worth fetching are asked for.
__device__ inline void load_bounds(const ScoreParams& p, const GroupRows& rows, bool lists, SiftBounds* bounds,
                                   const KernelErrorView& errors) {
  const std::int32_t row = rows.first + lane_index();
  if (row < rows.last) {
    const std::int32_t session = p.step.session[row];
    SiftBounds own{float_of(kFloatNan), float_of(kFloatNan)};
    if (session >= 0 && length_of(p, row, errors) > p.shape.top_k) {
      const std::int64_t place = session * p.sift.predicted_stride;
      own = sift_bounds(p.sift.thresholds[place], p.sift.deviations[place]);
    }
    bounds[lane_index()] = {own.candidates, lists ? own.prefetch : float_of(kFloatNan)};
    if (own.candidates == own.candidates) {
      RowSift& sift = p.sift.rows[row - p.block.first];
      *reinterpret_cast<uint2*>(&sift.candidates) = make_uint2(ordered_key(own.candidates), ordered_key(own.prefetch));
    }
  }
  __syncwarp();
}

/// A multiplying warp's part in it. Lanes know of rows as in LaneRows, and of one row of the group each.
template <int kRows, bool kOne>
class LaneSift {
  static constexpr int kPairs = (kRows + 1) / 2;
  static constexpr int kPlaces = pending_places(kOne);

 public:
  __device__ LaneSift(const ScoreParams& p, const ScoreStages& shared, int warp)
      : p_(p),
        memory_(sift_memory(shared)),
        pending_(reinterpret_cast<PendingTokens<kPlaces>*>(&memory_ + 1)[warp]),
        warp_(warp) {}

  /// Goes to a group.
  __device__ void enter(const GroupQueries& queries, std::int32_t group) {
    list_pending();
    leave();
    __syncwarp();
    if (lane_index() == 0) {
      memory_.rings[warp_].first_row = queries.rows[0];
      memory_.rings[warp_].buffer = group % kBuffers;
    }
    if (counts() && lane_index() < kMostRows) {
      const float from = memory_.bounds[group % kBuffers][lane_index()].candidates;
      const bool sifted = lane_index() < queries.rows[1] && from == from;
      group_counts().lengths[lane_index()] = sifted ? queries.lengths[lane_index()] : 0;
    }
    if (kOne) {
      set(0, group);
    }
    __syncwarp();
  }
  /// Goes to the rows of a product of a group that begins at `row`.
  __device__ void set(std::int32_t row, std::int32_t group) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      from_[i] = memory_.bounds[group % kBuffers][min(own(row, i), kMostRows - 1)].candidates;
    }
  }

  /// Before the rows of a key block. Where it lies waits in memory for the few times that it is needed.
  __device__ void begin_block(const StageWork& work) {
    if (lane_index() == 0) {
      memory_.rings[warp_].host_block = work.host_block;
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
  /// When all rows of a key block have been looked at. One warp counts for its warpgroup: many warps that add to the
  /// same words at the end of the launch keep each other waiting.
  __device__ void end_block(std::int32_t token) {
    if (counts()) {
      if (lane_index() < kMostRows) {
        SiftCounts& own = group_counts();
        own.compared[lane_index()] += min(max(own.lengths[lane_index()] - token, 0), kTokensPerBlock);
      }
      if (lane_index() == 0) {
        std::int32_t& finished = group_counts().finished;
        show(finished, finished + 1);
      }
    }
  }
  /// When the share is done: all warps of the thread block together.
  __device__ void finish();

 private:
  /// Of the group, in the row block.
  __device__ std::int32_t first_row() const { return memory_.rings[warp_].first_row; }
  /// Whether the warp counts for its warpgroup; a lane for a row.
  __device__ bool counts() const { return warp_ % kGroupWarps == 0; }
  __device__ SiftCounts& group_counts() const { return memory_.counts[warp_ / kGroupWarps]; }
  /// Within the group.
  __device__ static std::int32_t own(std::int32_t row, int i) { return row + 2 * i + lane_index() % 4 / 2; }

  __device__ void take(unsigned lanes, bool passes, float score, std::int32_t position, std::int32_t row) {
    if (count_ > kPlaces - kWarp) [[unlikely]] {
      list_pending();
    }
    if (passes) {
      const std::int32_t place = count_ + rank_in(lanes);
      pending_.tokens[place] = {ordered_key(score), position};
      pending_.rows[place] = row;
    }
    count_ += __popc(lanes);
    if (p_.sift.prefetch_cap > 0.0F) {
      const bool wanted = passes && score >= memory_.bounds[memory_.rings[warp_].buffer][row].prefetch;
      const unsigned wanting = __ballot_sync(kAllLanes, wanted);
      if (wanting == 0U) {
        return;
      }
      WantedRing& ring = memory_.rings[warp_];
      __syncwarp();
      const std::int32_t before = ring.put;
      if (wanted) {
        ring.rows[(before + rank_in(wanting)) % kRingPlaces] =
            ring.host_block * kTokensPerBlock + position % kTokensPerBlock;
      }
      __syncwarp();
      if (lane_index() == 0) {
        show(ring.put, before + __popc(wanting));
      }
    }
  }
  /// Lists what is pending, within a share. Short code: it lies in the loop over key blocks.
  __device__ void list_pending();
  __device__ void put(std::int32_t at, std::int32_t row, std::int32_t place) const {
    if (place < p_.sift.capacity) {
      p_.sift.tokens[static_cast<std::int64_t>(row) * p_.sift.capacity + place] = pending_.tokens[at];
    }
  }
  __device__ void leave() {
    if (counts() && lane_index() < kMostRows) {
      std::int32_t& compared = group_counts().compared[lane_index()];
      if (compared != 0) {
        atomicAdd(&p_.sift.rows[first_row() + lane_index()].compared, compared);
        compared = 0;
      }
    }
  }

  const ScoreParams& p_;
  SiftMemory& memory_;
  PendingTokens<kPlaces>& pending_;
  int warp_;
  std::int32_t count_ = 0;  ///< pending
  float from_[kPairs] = {};
};

template <int kRows, bool kOne>
__device__ void LaneSift<kRows, kOne>::list_pending() {
  __syncwarp();
#pragma unroll 1
  for (std::int32_t from = 0; from < count_; from += kWarp) {
    const std::int32_t at = from + lane_index();
    const std::int32_t row = at < count_ ? pending_.rows[at] : kNone;
    const unsigned peers = __match_any_sync(kAllLanes, row);  // lanes with candidates of the same row
    std::int32_t place = 0;
    if (row != kNone && rank_in(peers) == 0) {
      place = atomicAdd(&p_.sift.rows[first_row() + row].found, __popc(peers));
    }
    place = __shfl_sync(kAllLanes, place, __ffs(static_cast<int>(peers)) - 1) + rank_in(peers);
    if (row != kNone) {
      put(at, first_row() + row, place);
    }
  }
  __syncwarp();
  count_ = 0;
}

// One atomic operation for each row of the last group, not one from each warp: all thread blocks come to their end at
// the same time, and to the same few words.
template <int kRows, bool kOne>
__device__ void LaneSift<kRows, kOne>::finish() {
  constexpr int kTogether = kPlaces / kWarp;
  static_assert(kPlaces % kWarp == 0);
  SiftEnd& end = memory_.end;
  std::int32_t rows[kTogether];
  std::int32_t places[kTogether];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const std::int32_t at = i * kWarp + lane_index();
    rows[i] = at < count_ ? pending_.rows[at] : kNone;
    const unsigned peers = __match_any_sync(kAllLanes, rows[i]);
    places[i] = 0;
    if (rows[i] != kNone && rank_in(peers) == 0) {
      places[i] = atomicAdd(&end.found[rows[i]], __popc(peers));
    }
    places[i] = __shfl_sync(kAllLanes, places[i], __ffs(static_cast<int>(peers)) - 1) + rank_in(peers);
  }
  meet(kListed, kMultiplierWarps * kWarp);
  if (warp_ == 0 && lane_index() < kMostRows) {
    std::int32_t compared = 0;
    for (const SiftCounts& of_group : memory_.counts) {
      compared += of_group.compared[lane_index()];
    }
    if (compared != 0) {
      RowSift& sift = p_.sift.rows[first_row() + lane_index()];
      end.first[lane_index()] = atomicAdd(&sift.found, end.found[lane_index()]);
      atomicAdd(&sift.compared, compared);
    }
  }
  meet(kListed, kMultiplierWarps * kWarp);
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (rows[i] != kNone) {
      put(i * kWarp + lane_index(), first_row() + rows[i], end.first[rows[i]] + places[i]);
    }
  }
}

}  // namespace echo
