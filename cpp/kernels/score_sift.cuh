#pragma once
// The sifting warps of score: they read finished scores back (from the L2 cache) and lag behind the multiplying warps,
// which only store how far they are. Two of the loading warps do it, and load queries in between.
//
// First they count the scores of the sample in bins, row by row, and add the counts to the row's in global memory. When
// a row's sample is there, whoever sees it first sets the row's bounds (sift_bounds.hpp). Then they compare the scores
// of all runs with them, the samples included: candidates are collected in shared memory and go to the row's list, many
// with one atomic operation; those for prefetch also to a ring, from which the third loading warp takes them
// (score_prefetch.cuh). If there are no bounds when the run has been scored, it is left: select will see that not all
// was compared.
// Cost: a row's scores are read 1 1/8 times, 512 at once by a warp. Measured on an H200, that takes a warp 2.8 us,
// mostly its own chain of instructions: two warps need 80 us for 13 x 100K tokens, which are scored in 49, and thread
// blocks with two groups wait for queries meanwhile. So the CUDA backend does not ask for it (Backend::sifts) until
// there are more such warps, or the multiplying ones compare.

#include "kernels/score_bounds.cuh"
#include "kernels/score_chunk.cuh"
#include "kernels/score_fetch.cuh"

namespace echo {

/// A sifting warp. All lanes call all functions. What is known of the rows of a group, at most 32, lies in lanes.
template <typename Loader>
class Sifter {
 public:
  __device__ Sifter(const ScoreParams& p, int index, SiftShared& shared, const RunList& list, Loader& loader,
                    const KernelErrorView& errors)
      : p_(p), index_(index), shared_(shared), list_(list), loader_(loader), errors_(errors) {}

  /// Sifts a whole share.
  __device__ void run() {
    Run run;
    std::int32_t next = 0;
    for (; get(next, run) && run.kind == RunKind::sample; ++next) {
      take_sample(run);
    }
    for (next = 0; get(next, run); ++next) {
      if (run.kind != RunKind::all) {
        compare_run(run);
      }
    }
    while (!loader_.finished()) {
      pause();
    }
  }

 private:
  __device__ RowSift& sift_of(std::int32_t lane) const { return p_.sift.rows[rows_.first + lane - p_.block.first]; }
  __device__ const float* scores_of(int lane) const {
    return p_.scores + (rows_.first + lane - p_.block.first) * p_.score_stride;
  }

  /// Waits for a run and reads it; false if there is none. Runs that are gone count as empty.
  __device__ bool get(std::int32_t index, Run& run) {
    while (!list_.has(index)) {
      if (list_.ends_at(index)) {
        return false;
      }
      pause();
    }
    if (!list_.copy(index, run)) {
      run.count = 0;
    }
    return true;
  }

  /// Goes to the rows of a group.
  __device__ void enter(const Run& run) {
    const GroupRows& rows = run.rows;
    if (rows.first == rows_.first) {
      return;
    }
    rows_ = rows;
    sampled_from_ = run.sampled;
    const std::int32_t row = rows.first + lane_index();
    state_ = RowState::left;
    length_ = 0;
    if (row < rows.last) {
      length_ = length_of(p_, row, errors_);
      const std::int32_t session = p_.step.session[row];
      if (session >= 0 && length_ > p_.shape.top_k) {
        const float predicted = p_.sift.predicted[session * p_.sift.predicted_stride];
        first_bin_ = first_bin(predicted);
        state_ = predicted == predicted ? RowState::open : RowState::left;
      }
    }
  }

  /// Waits until the first key blocks of the share have been scored, and loads queries meanwhile.
  __device__ void wait_for_scores(std::int32_t blocks) {
    while (!scored(blocks)) {
      pause();
    }
  }
  __device__ bool scored(std::int32_t blocks) {
    if (available_ < blocks) {
      available_ = shared_.progress.available();
    }
    return available_ >= blocks;
  }
  __device__ void pause() {
    if (!loader_.try_next()) {
      __nanosleep(100);
    }
  }

  __device__ void take_sample(const Run& run);
  /// Waits for the bounds of all rows of the group; those that get none until the share's first `end` blocks have been
  /// scored, and well more than its samples, are left.
  __device__ void settle_bounds(std::int32_t end);
  __device__ void compare_run(const Run& run);
  __device__ void collect(const ScoreChunk& chunk, unsigned hits, int lane);
  /// Lists what was collected, all of one row's.
  __device__ void flush(int lane);
  /// Hands some of what was collected to the prefetching warp.
  __device__ void want(std::int32_t from, std::uint32_t bound);

  enum class RowState : std::int32_t {
    open,  ///< its bounds are to be found
    set,   ///< it has them
    left,  ///< it is not sifted
  };

  const ScoreParams& p_;
  int index_;
  SiftShared& shared_;
  const RunList& list_;
  Loader& loader_;
  const KernelErrorView& errors_;
  std::int32_t available_ = 0;
  std::int32_t collected_ = 0;
  GroupRows rows_{kNone, kNone, kNone};
  std::int32_t sampled_from_ = 0;  ///< first block of the group's sample
  // Of the lane's row.
  RowState state_ = RowState::left;
  std::int32_t length_ = 0;
  std::int32_t first_bin_ = 0;
  std::uint32_t candidates_from_ = kNoKey;
  std::uint32_t prefetch_from_ = kNoKey;
};

template <typename Loader>
__device__ void Sifter<Loader>::take_sample(const Run& run) {
  if (index_ * kChunkBlocks >= run.count) {
    return;
  }
  enter(run);
  std::int32_t* bins = shared_.bins[index_];
  for (unsigned rows = __ballot_sync(kAllLanes, state_ == RowState::open); rows != 0U; rows &= rows - 1U) {
    const int lane = __ffs(static_cast<int>(rows)) - 1;
    const std::int32_t length = __shfl_sync(kAllLanes, length_, lane);
    const std::int32_t first = __shfl_sync(kAllLanes, first_bin_, lane);
    for (int bin = lane_index(); bin < kSiftBins; bin += kWarp) {
      bins[bin] = 0;
    }
    __syncwarp();
    std::int32_t sampled = 0;
    for (std::int32_t block = index_ * kChunkBlocks; block < run.count; block += kSifters * kChunkBlocks) {
      wait_for_scores(run.before + min(block + kChunkBlocks, run.count));
      ScoreChunk chunk;
      chunk.load(run, block, scores_of(lane), length);
      chunk.for_each([&](int i, float score) {
        const std::int32_t bin = bin_of(ordered_key(score), first);
        if (bin > 0 && (chunk.there >> i & 1U) != 0U) {
          atomicAdd(bins + bin, 1);
        }
      });
      sampled += __popc(chunk.there);
    }
    __syncwarp();
    RowSift& sift = sift_of(lane);
    for (int bin = lane_index(); bin < kSiftBins; bin += kWarp) {
      if (bins[bin] != 0) {
        atomicAdd(sift.histogram + bin, bins[bin]);
      }
    }
    sampled = warp_sum(sampled);
    __threadfence();
    __syncwarp();
    if (lane_index() == 0) {
      atomicAdd(&sift.sampled, sampled);
    }
  }
}

template <typename Loader>
__device__ void Sifter<Loader>::settle_bounds(std::int32_t end) {
  while (__any_sync(kAllLanes, state_ == RowState::open)) {
    const bool late =
        scored(max(end, warp_load_acquired(list_.share) * 3 / kSampleEvery));  // before looking at what is counted
    std::int32_t sampled = 0;
    std::uint64_t bounds = 0;
    if (state_ == RowState::open) {
      const volatile RowSift& sift = sift_of(lane_index());
      bounds = sift.bounds;
      sampled = sift.sampled;
    }
    const std::int32_t all = sample_of(length_, sampled_from_);
    // What is missing of nearly all counts as nothing: the bounds come out a little lower.
    const bool nearly_all = sampled >= all - all / 8;
    const bool ready = state_ == RowState::open && bounds == 0U && (nearly_all || (late && sampled >= all / 4));
    const unsigned lanes = __ballot_sync(kAllLanes, ready);
    bool found = state_ == RowState::open && bounds != 0U;
    if (lanes != 0U) {
      __threadfence();
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const std::uint64_t made = set_bounds(p_, sift_of(lane), __shfl_sync(kAllLanes, length_, lane),
                                            __shfl_sync(kAllLanes, nearly_all ? all : sampled, lane),
                                            __shfl_sync(kAllLanes, first_bin_, lane));
      if (lane_index() == lane) {
        bounds = made;
        found = made != 0U;
        state_ = found ? state_ : RowState::left;
      }
    }
    if (found) {
      candidates_from_ = static_cast<std::uint32_t>(bounds);
      prefetch_from_ = static_cast<std::uint32_t>(bounds >> 32);
      state_ = RowState::set;
    }
    if (late && lanes == 0U) {
      state_ = state_ == RowState::open ? RowState::left : state_;
    } else if (__any_sync(kAllLanes, state_ == RowState::open) && lanes == 0U) {
      pause();
    }
  }
}

template <typename Loader>
__device__ void Sifter<Loader>::compare_run(const Run& run) {
  if (index_ * kChunkBlocks >= run.count) {
    return;
  }
  enter(run);
  settle_bounds(run.end());
  const unsigned rows = __ballot_sync(kAllLanes, state_ == RowState::set);
  if (rows == 0U) {
    return;
  }
  std::int32_t compared = 0;  // of the lane's row
  for (std::int32_t block = index_ * kChunkBlocks; block < run.count; block += kSifters * kChunkBlocks) {
    wait_for_scores(run.before + min(block + kChunkBlocks, run.count));
    for (unsigned left = rows; left != 0U; left &= left - 1U) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      ScoreChunk chunk;
      chunk.load(run, block, scores_of(lane), __shfl_sync(kAllLanes, length_, lane));
      // Keys below that of -inf are none of a score: comparing scores is comparing keys.
      const std::uint32_t least = ordered_key(-__int_as_float(static_cast<int>(kFloatInf)));
      const unsigned hits = chunk.at_least(value_of_key(max(__shfl_sync(kAllLanes, candidates_from_, lane), least)));
      if (__any_sync(kAllLanes, hits != 0U)) {
        collect(chunk, hits, lane);
      }
      const auto count =
          static_cast<std::int32_t>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(__popc(chunk.there))));
      compared += lane_index() == lane ? count : 0;
      if (rows != 1U << lane) {  // the next row's candidates go elsewhere
        flush(lane);
      }
    }
    loader_.try_next();
  }
  if (collected_ > 0) {
    flush(__ffs(static_cast<int>(rows)) - 1);
  }
  if (compared != 0) {
    atomicAdd(&sift_of(lane_index()).compared, compared);
  }
}

template <typename Loader>
__device__ void Sifter<Loader>::collect(const ScoreChunk& chunk, unsigned hits, int lane) {
  constexpr std::int32_t kFlushFrom = kCollected - kChunkBlocks * kTokensPerBlock;
  if (collected_ > kFlushFrom) {
    flush(lane);
  }
  const std::int32_t own = __popc(hits);
  const std::int32_t up_to = inclusive_warp_sum(own);
  ScoredToken* to = shared_.collected[index_] + collected_ + up_to - own;
#pragma unroll
  for (int i = 0; i < kChunkLoads; ++i) {
    const float4& four = chunk.fours[i];
    const float scores[4] = {four.x, four.y, four.z, four.w};
    if ((hits >> (4 * i) & 0xFU) != 0U) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((hits >> (4 * i + j) & 1U) != 0U) {
          *to = {ordered_key(scores[j]), chunk.tokens[i] + j};
          ++to;
        }
      }
    }
  }
  __syncwarp();
  const std::int32_t from = collected_;
  collected_ += __shfl_sync(kAllLanes, up_to, kWarp - 1);
  if (p_.sift.prefetch_cap > 0.0F) {
    want(from, __shfl_sync(kAllLanes, prefetch_from_, lane));
  }
}

template <typename Loader>
__device__ void Sifter<Loader>::flush(int lane) {
  std::int32_t place = 0;
  if (lane_index() == 0) {
    place = atomicAdd(&sift_of(lane).found, collected_);
  }
  place = __shfl_sync(kAllLanes, place, 0);
  ScoredToken* tokens =
      p_.sift.tokens + static_cast<std::int64_t>(rows_.first + lane - p_.block.first) * p_.sift.capacity;
  for (std::int32_t i = lane_index(); i < collected_ && place + i < p_.sift.capacity; i += kWarp) {
    tokens[place + i] = shared_.collected[index_][i];
  }
  __syncwarp();
  collected_ = 0;
}

template <typename Loader>
__device__ void Sifter<Loader>::want(std::int32_t from, std::uint32_t bound) {
  PrefetchRing& ring = shared_.rings[index_];
  std::int32_t put = ring.put;
  const std::int32_t end = warp_load_acquired(ring.taken) + kRingPlaces;
  for (std::int32_t first = from; first < collected_; first += kWarp) {
    const std::int32_t i = first + lane_index();
    const ScoredToken token = i < collected_ ? shared_.collected[index_][i] : ScoredToken{0U, kNone};
    const unsigned wants = __ballot_sync(kAllLanes, token.key >= bound);
    const std::int32_t place = put + __popc(wants & ((1U << lane_index()) - 1U));
    if (token.key >= bound && place < end) {
      ring.tokens[place % kRingPlaces] = {rows_.entry, token.position};
    }
    put = min(put + __popc(wants), end);
  }
  __syncwarp();
  if (lane_index() == 0) {
    store_released(ring.put, put);
  }
  __syncwarp();
}

}  // namespace echo
