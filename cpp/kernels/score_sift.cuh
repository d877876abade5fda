#pragma once
// The sifting warps of score: they read finished scores back (from the L2 cache), lag behind the multiplying warps and
// cannot hold them up. Two of the loading warps do it, and load queries in between.
//
// First they count the scores of the sample of a part (score_walk.cuh) in bins, row by row, and add the counts to the
// row's in global memory. When a row's sample is there, whoever sees it first sets the row's bounds (sift_bounds.hpp).
// Then they compare all scores of the part with them, the sample's included: candidates go to the row's list, a place
// for all those of 512 scores with one atomic operation; those for prefetch to a ring in shared memory, from which the
// third loading warp takes them (score_prefetch.cuh). If there are no bounds when the part has been scored, it is left:
// select will see that not all was compared.
// Cost: a row's scores are read 1 1/8 times, 16 loads of a warp at once: 15 us of each sifting warp for 13 x 100K
// tokens, beside 45 us of multiplying.

#include "kernels/score_fetch.cuh"
#include "kernels/sift_bounds.hpp"

namespace echo {

inline constexpr int kSifters = 2;      ///< warps
inline constexpr int kChunkBlocks = 4;  ///< key blocks that a sifter reads at once
inline constexpr int kChunkLoads = kChunkBlocks * kTokensPerBlock / kWarp;
inline constexpr std::int32_t kRingPlaces = 256;
static_assert(kSifters < kLoaderWarps);

/// A token that is worth fetching.
struct alignas(8) WantedToken {
  std::int32_t entry;  ///< of the batch
  std::int32_t position;
};

/// From a sifter to the prefetching warp. What does not fit is dropped.
struct PrefetchRing {
  WantedToken tokens[kRingPlaces];
  std::int32_t put;    ///< so far; by the sifter
  std::int32_t taken;  ///< by the prefetcher
};

__device__ inline std::int32_t load_acquired(const std::int32_t& word) {
  std::int32_t value = 0;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(&word)) : "memory");
  return value;
}
__device__ inline void store_released(std::int32_t& word, std::int32_t value) {
  asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}

struct SiftShared {
  ScoreProgress progress;
  PrefetchRing rings[kSifters];
  std::int32_t bins[kSifters][kSiftBins];

  /// Before anybody looks; by one warp.
  __device__ void clear() {
    if (lane_index() < kMultiplierWarps) {
      progress.finished[lane_index()] = 0;
    }
    if (lane_index() < kSifters) {
      rings[lane_index()].put = rings[lane_index()].taken = 0;
    }
  }
};

/// A sifting warp. All lanes call all functions. What is known of the rows of a group, at most 32, lies in lanes.
template <typename Loader>
class Sifter {
 public:
  __device__ Sifter(const ScoreParams& p, int index, SiftShared& shared, Loader& loader, const KernelErrorView& errors)
      : p_(p), index_(index), shared_(shared), loader_(loader), errors_(errors) {}

  /// Sifts a whole share.
  __device__ void run(ShareWalk<true> walk) {
    std::int32_t done = 0;
    do {
      const Run run = walk.run();
      enter(run.rows);
      if (run.kind == RunKind::sample) {
        take_sample(run, done);
      } else {
        compare_part(walk.own_part(), done);
      }
      done += run.count;
    } while (walk.next());
    while (loader_.more()) {
      loader_.try_load();
    }
  }

 private:
  __device__ RowSift& sift_of(std::int32_t row) const { return p_.sift.rows[row - p_.block.first]; }

  /// Goes to the rows of a group.
  __device__ void enter(const GroupRows& rows) {
    rows_ = rows;
    const std::int32_t row = rows.first + lane_index();
    wanted_ = false;
    length_ = 0;
    if (row < rows.last) {
      length_ = length_of(p_, row, errors_);
      const std::int32_t session = p_.step.session[row];
      if (session >= 0 && length_ > p_.shape.top_k) {
        const float predicted = p_.sift.predicted[session * p_.sift.predicted_stride];
        first_bin_ = first_bin(predicted);
        wanted_ = predicted == predicted;
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
    loader_.try_load();
    __nanosleep(100);
  }

  /// Scores of a row, of the blocks from `first` on of a run. A lane has two of each block.
  struct Chunk {
    std::uint32_t there = 0;  ///< a bit for each
    float scores[kChunkLoads];
  };
  /// Token of a lane's i-th score.
  __device__ static std::int32_t token_of(const Run& run, std::int32_t first, int i) {
    return run.block(first + i / 2) * kTokensPerBlock + i % 2 * kWarp + lane_index();
  }
  __device__ Chunk load_chunk(const Run& run, std::int32_t first, std::int32_t row, std::int32_t length) const {
    Chunk chunk;
    const float* scores = p_.scores + (row - p_.block.first) * p_.score_stride;
#pragma unroll
    for (int i = 0; i < kChunkLoads; ++i) {
      const std::int32_t token = token_of(run, first, i);
      const bool there = first + i / 2 < run.count && token < length;
      chunk.there |= (there ? 1U : 0U) << i;
      chunk.scores[i] = there ? scores[token] : 0.0F;
    }
    return chunk;
  }

  __device__ void take_sample(const Run& run, std::int32_t done);
  /// Waits for the bounds of all rows that are wanted; those that get none by the time that the share's first `end`
  /// blocks have been scored no longer are.
  __device__ void settle_bounds(std::int32_t end);
  /// Those of one row, from what has been counted, if that will do.
  __device__ std::uint64_t set_bounds(std::int32_t row, std::int32_t length, std::int32_t sampled,
                                      std::int32_t first) const;
  __device__ void compare_part(const Part& part, std::int32_t done);
  __device__ void compare_chunk(const Run& run, std::int32_t first);
  __device__ void list(const Run& run, std::int32_t first, const Chunk& chunk, std::uint32_t hits,
                       std::int32_t row) const;
  __device__ void want(const Run& run, std::int32_t first, std::uint32_t hits);

  const ScoreParams& p_;
  int index_;
  SiftShared& shared_;
  Loader& loader_;
  const KernelErrorView& errors_;
  std::int32_t available_ = 0;
  GroupRows rows_{};
  // Of the lane's row.
  bool wanted_ = false;
  std::int32_t length_ = 0;
  std::int32_t first_bin_ = 0;
  std::uint32_t candidates_from_ = kNoKey;
  std::uint32_t prefetch_from_ = kNoKey;
  std::int32_t compared_ = 0;
};

template <typename Loader>
__device__ void Sifter<Loader>::take_sample(const Run& run, std::int32_t done) {
  if (index_ * kChunkBlocks >= run.count) {
    return;
  }
  wait_for_scores(done + run.count);
  std::int32_t* bins = shared_.bins[index_];
  for (unsigned rows = __ballot_sync(kAllLanes, wanted_); rows != 0U; rows &= rows - 1U) {
    const int lane = __ffs(static_cast<int>(rows)) - 1;
    const std::int32_t row = rows_.first + lane;
    const std::int32_t length = __shfl_sync(kAllLanes, length_, lane);
    const std::int32_t first = __shfl_sync(kAllLanes, first_bin_, lane);
    for (int bin = lane_index(); bin < kSiftBins; bin += kWarp) {
      bins[bin] = 0;
    }
    __syncwarp();
    std::int32_t sampled = 0;
    for (std::int32_t block = index_ * kChunkBlocks; block < run.count; block += kSifters * kChunkBlocks) {
      const Chunk chunk = load_chunk(run, block, row, length);
#pragma unroll
      for (int i = 0; i < kChunkLoads; ++i) {
        const std::int32_t bin = bin_of(ordered_key(chunk.scores[i]), first);
        if ((chunk.there >> i & 1U) != 0U && bin > 0) {
          atomicAdd(bins + bin, 1);
        }
      }
      sampled += __popc(chunk.there);
    }
    __syncwarp();
    RowSift& sift = sift_of(row);
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
__device__ std::uint64_t Sifter<Loader>::set_bounds(std::int32_t row, std::int32_t length, std::int32_t sampled,
                                                    std::int32_t first) const {
  constexpr int kLaneBins = kSiftBins / kWarp;
  RowSift& sift = sift_of(row);
  const auto* source = reinterpret_cast<const int4*>(sift.histogram) + lane_index() * 2;
  const int4 low = __ldcg(source);
  const int4 high = __ldcg(source + 1);
  const std::int32_t counts[kLaneBins] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  std::int32_t own = 0;
#pragma unroll
  for (const std::int32_t count : counts) {
    own += count;
  }
  const std::int32_t up_to = inclusive_warp_sum(own);
  std::int32_t from = __shfl_sync(kAllLanes, up_to, kWarp - 1) - up_to;  // counts of the bins above
  const SiftTargets targets = sift_targets(p_.shape.top_k, p_.sift.capacity, sampled, length);
  // The highest of the lane's bins from which on there are enough.
  std::int32_t candidates = kNone;
  std::int32_t prefetch = kNone;
  std::int32_t at_candidates = 0;
#pragma unroll
  for (int i = kLaneBins - 1; i >= 0; --i) {
    from += counts[i];
    if (candidates == kNone && from >= targets.candidates) {
      candidates = lane_index() * kLaneBins + i;
      at_candidates = from;
    }
    if (prefetch == kNone && from >= targets.prefetch) {
      prefetch = lane_index() * kLaneBins + i;
    }
  }
  const unsigned enough = __ballot_sync(kAllLanes, candidates != kNone);
  if (enough == 0U) {
    return 0U;
  }
  const int lane = kWarp - 1 - __clz(static_cast<int>(enough));
  candidates = __shfl_sync(kAllLanes, candidates, lane);
  at_candidates = __shfl_sync(kAllLanes, at_candidates, lane);
  prefetch = __reduce_max_sync(kAllLanes, prefetch);
  const std::uint32_t key = key_of_bin(candidates, first);
  if (key == 0U || at_candidates > targets.most) {
    return 0U;
  }
  // All that lies above the bins may be far more than k rows.
  const std::uint32_t prefetch_key = prefetch == kSiftBins - 1 ? kNoKey : key_of_bin(prefetch, first);
  std::uint64_t bounds = pack_bounds(key, prefetch_key);
  if (lane_index() == 0) {
    const std::uint64_t held =
        atomicCAS(reinterpret_cast<unsigned long long*>(&sift.bounds), 0ULL, static_cast<unsigned long long>(bounds));
    bounds = held == 0U ? bounds : held;
  }
  return __shfl_sync(kAllLanes, bounds, 0);
}

template <typename Loader>
__device__ void Sifter<Loader>::settle_bounds(std::int32_t end) {
  candidates_from_ = prefetch_from_ = kNoKey;
  compared_ = 0;
  bool open = wanted_;
  while (__any_sync(kAllLanes, open)) {
    const bool late = scored(end);  // before looking: what was counted until then is seen
    std::int32_t sampled = 0;
    if (open) {
      const volatile RowSift& sift = sift_of(rows_.first + lane_index());
      const std::uint64_t bounds = sift.bounds;
      sampled = sift.sampled;
      if (bounds != 0U) {
        candidates_from_ = static_cast<std::uint32_t>(bounds);
        prefetch_from_ = static_cast<std::uint32_t>(bounds >> 32);
        open = false;
      }
    }
    const std::int32_t all = sample_of(length_);
    // What is missing of nearly all counts as nothing: the bounds come out a little lower.
    const bool nearly_all = sampled >= all - all / 8;
    const bool ready = open && (nearly_all || (late && sampled >= all / 4));
    const unsigned lanes = __ballot_sync(kAllLanes, ready);
    if (lanes != 0U) {
      __threadfence();
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const std::uint64_t bounds =
          set_bounds(rows_.first + lane, __shfl_sync(kAllLanes, length_, lane),
                     __shfl_sync(kAllLanes, nearly_all ? all : sampled, lane), __shfl_sync(kAllLanes, first_bin_, lane));
      if (lane_index() == lane) {
        open = false;
        wanted_ = bounds != 0U;
        candidates_from_ = wanted_ ? static_cast<std::uint32_t>(bounds) : kNoKey;
        prefetch_from_ = wanted_ ? static_cast<std::uint32_t>(bounds >> 32) : kNoKey;
      }
    } else if (late) {
      wanted_ = wanted_ && !open;
      open = false;
    } else if (__any_sync(kAllLanes, open)) {
      pause();
    }
  }
}

/// The part's rest begins behind the share's first `done` blocks; its sample has been scored.
template <typename Loader>
__device__ void Sifter<Loader>::compare_part(const Part& part, std::int32_t done) {
  const Run rest = part.run(RunKind::rest, 0);
  settle_bounds(done + rest.count);
  if (!__any_sync(kAllLanes, wanted_)) {
    return;
  }
  const Run sample = part.run(RunKind::sample, 0);
  for (std::int32_t block = index_ * kChunkBlocks; block < sample.count; block += kSifters * kChunkBlocks) {
    compare_chunk(sample, block);
    loader_.try_load();
  }
  for (std::int32_t block = index_ * kChunkBlocks; block < rest.count; block += kSifters * kChunkBlocks) {
    wait_for_scores(done + min(block + kChunkBlocks, rest.count));
    compare_chunk(rest, block);
    loader_.try_load();
  }
  if (wanted_) {
    atomicAdd(&sift_of(rows_.first + lane_index()).compared, compared_);
  }
}

template <typename Loader>
__device__ void Sifter<Loader>::compare_chunk(const Run& run, std::int32_t first) {
  for (unsigned rows = __ballot_sync(kAllLanes, wanted_); rows != 0U; rows &= rows - 1U) {
    const int lane = __ffs(static_cast<int>(rows)) - 1;
    const std::int32_t row = rows_.first + lane;
    const std::uint32_t candidates_from = __shfl_sync(kAllLanes, candidates_from_, lane);
    const std::uint32_t prefetch_from = __shfl_sync(kAllLanes, prefetch_from_, lane);
    const Chunk chunk = load_chunk(run, first, row, __shfl_sync(kAllLanes, length_, lane));
    std::uint32_t hits = 0;  // a bit for each of the lane's scores
    std::uint32_t wants = 0;
#pragma unroll
    for (int i = 0; i < kChunkLoads; ++i) {
      const std::uint32_t key = ordered_key(chunk.scores[i]);
      hits |= (key >= candidates_from ? 1U : 0U) << i;
      wants |= (key >= prefetch_from ? 1U : 0U) << i;
    }
    hits &= chunk.there;
    wants &= chunk.there;
    if (__any_sync(kAllLanes, hits != 0U)) {
      list(run, first, chunk, hits, row);
    }
    if (p_.sift.prefetch_cap > 0.0F && __any_sync(kAllLanes, wants != 0U)) {
      want(run, first, wants);
    }
    const std::int32_t compared = warp_sum(__popc(chunk.there));
    compared_ += lane_index() == lane ? compared : 0;
  }
}

/// Lists the candidates of a chunk.
template <typename Loader>
__device__ void Sifter<Loader>::list(const Run& run, std::int32_t first, const Chunk& chunk, std::uint32_t hits,
                                     std::int32_t row) const {
  const std::int32_t own = __popc(hits);
  const std::int32_t up_to = inclusive_warp_sum(own);
  std::int32_t place = 0;
  if (lane_index() == kWarp - 1) {
    place = atomicAdd(&sift_of(row).found, up_to);
  }
  place = __shfl_sync(kAllLanes, place, kWarp - 1) + up_to - own;
  ScoredToken* tokens = p_.sift.tokens + static_cast<std::int64_t>(row - p_.block.first) * p_.sift.capacity;
#pragma unroll
  for (int i = 0; i < kChunkLoads; ++i) {
    if ((hits >> i & 1U) != 0U) {
      if (place < p_.sift.capacity) {
        tokens[place] = {ordered_key(chunk.scores[i]), token_of(run, first, i)};
      }
      ++place;
    }
  }
}

/// Hands tokens to the prefetching warp.
template <typename Loader>
__device__ void Sifter<Loader>::want(const Run& run, std::int32_t first, std::uint32_t hits) {
  PrefetchRing& ring = shared_.rings[index_];
  const std::int32_t own = __popc(hits);
  const std::int32_t up_to = inclusive_warp_sum(own);
  const std::int32_t put = ring.put;
  const std::int32_t room = load_acquired(ring.taken) + kRingPlaces - put;
  std::int32_t place = up_to - own;
#pragma unroll
  for (int i = 0; i < kChunkLoads; ++i) {
    if ((hits >> i & 1U) != 0U) {
      if (place < room) {
        ring.tokens[(put + place) % kRingPlaces] = {rows_.entry, token_of(run, first, i)};
      }
      ++place;
    }
  }
  const std::int32_t all = __shfl_sync(kAllLanes, up_to, kWarp - 1);
  __syncwarp();
  if (lane_index() == 0) {
    store_released(ring.put, put + min(all, room));
  }
  __syncwarp();
}

}  // namespace echo
