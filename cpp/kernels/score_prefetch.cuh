#pragma once
// Prefetch beside score. In a thread block that scores one warp takes the tokens that the multiplying warps think will
// be selected, claims those of their rows that are missing, and lists them in a queue in global memory. (Rows that the
// pass appends have slots.) The last few thread blocks of the grid score nothing: one warp of each deals out what the
// queue has, the others fetch (prefetch_rows.cuh). Where no row has been missing for some steps, all score. Where the
// layer's last score asked for more rows than these thread blocks fetch meanwhile (kMuchMissing), some more prefetch,
// and only rows whose score lies a deviation above the average are asked for: 13 x 100K tokens with 10 % missing take
// 97 us from score to recall instead of 100.
//
// So reads of the host hold up nobody's keys, and where much is missing rows come as fast as the link allows, 33 per
// us; without these multiprocessors score takes 2.5 us longer. A thread block lists nothing any more when what is left
// of its share takes no longer than a fetch, or is half of a short share, and when all have come so far no other fetch
// begins: rows that nobody has begun to fetch are given up. So the launch does not end much later than without
// prefetch. Those that prefetch wait for those that score, which come before them in the grid and so have been started
// before. Cost on an H200 for 13 x 100K tokens, in a layer: score takes 47.6 us if it only lists, 51.2 where nothing is
// missing but lately was, 53.0 while 600 rows of 656 bytes come (2 % missing).

#include "cache_manager/prefetch_rows.cuh"
#include "kernels/prefetch_queue.hpp"
#include "kernels/score_runs.cuh"
#include "kernels/score_sift.cuh"

namespace echo {

/// Key blocks that are scored while a fetch goes on. At most half of a share counts: a short one would list hardly
/// anything.
inline constexpr std::int32_t kFetchBlocks = 24;
inline constexpr std::int32_t kFetchWarps = kScoreThreads / kWarp - 1;  ///< of a thread block that prefetches

/// Shared memory of a thread block that prefetches, where others have keys.
struct PrefetchBlock {
  std::int32_t dealt;  ///< rows so far
  std::int32_t taken;
  std::int32_t over;  ///< whether nothing more is to begin
  PrefetchShared warps[kFetchWarps];
  std::int32_t rows[kQueuePlaces];
};
static_assert(sizeof(PrefetchBlock) <= kIdleBytes);

/// A word of shared memory that another warp shows, the same for all lanes.
__device__ inline std::int32_t look_at(const std::int32_t& word) {
  return __shfl_sync(kAllLanes, ptx::load_shared_volatile(ptx::shared_address(&word)), 0);
}

/// Whether a fetch that begins now would end behind a share of so many key blocks.
__device__ inline bool too_late(const SiftMemory& memory, std::int32_t share) {
  std::int32_t left = share;
#pragma unroll
  for (const std::int32_t& finished : memory.finished) {
    left -= look_at(finished);
  }
  return look_at(memory.fetched) != 0 || left < min(kFetchBlocks, share / 2);
}

/// Host row of a token, kNone if there is none.
__device__ inline std::int32_t wanted_row(const ScoreParams& p, const WantedToken& token) {
  const std::int32_t entry = (p.block.first + token.row) / p.step.query_rows;
  const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(entry) * p.step.table_stride;
  const std::int32_t block = table[token.position / kTokensPerBlock];
  const bool good = block >= 0 && block < p.layer.host_rows / kTokensPerBlock;
  return good ? block * kTokensPerBlock + token.position % kTokensPerBlock : kNone;
}

/// Rows that a call may prefetch.
__device__ inline std::int32_t prefetch_cap(const ScoreParams& p, const KernelErrorView& errors) {
  float tokens = 0.0F;
#pragma unroll 1
  for (std::int32_t i = lane_index(); i < p.block.count; i += kWarp) {
    tokens += static_cast<float>(length_of(p, p.block.first + i, errors));
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    tokens += __shfl_xor_sync(kAllLanes, tokens, step);
  }
  return static_cast<std::int32_t>(fminf(tokens * p.sift.prefetch_cap, 1e9F));
}

/// Reads the rings, all of them in turns. By a warp; lane w knows of the ring of multiplying warp w.
class RingReader {
 public:
  __device__ explicit RingReader(const WantedRing* rings) : rings_(rings) {}

  /// Takes up to 32 tokens, one for each lane; `there` says whether a lane has one. Tokens that have been overwritten
  /// are gone; one that is overwritten now may come twice.
  __device__ WantedToken take(bool& there) {
    std::int32_t fresh = 0;
    if (lane_index() < kMultiplierWarps) {
      const std::int32_t put = ptx::load_shared_volatile(ptx::shared_address(&rings_[lane_index()].put));
      const std::int32_t gone = max(put - taken_ - kRingPlaces, 0);
      lost_ += gone;
      taken_ += gone;
      fresh = put - taken_;
    }
    const std::int32_t up_to = inclusive_warp_sum(fresh);
    there = lane_index() < __shfl_sync(kAllLanes, up_to, kWarp - 1);
    int ring = 0;  // that has the lane's: as many as end at or before it come first
#pragma unroll
    for (int i = 0; i < kMultiplierWarps - 1; ++i) {
      ring += __shfl_sync(kAllLanes, up_to, i) <= lane_index() ? 1 : 0;
    }
    const std::int32_t place = __shfl_sync(kAllLanes, taken_ - (up_to - fresh), ring) + lane_index();
    taken_ += min(fresh, max(kWarp - (up_to - fresh), 0));
    return there ? rings_[ring].look_at(place) : WantedToken{kNone, kNone};
  }

  /// Tokens that this was too slow for.
  __device__ std::int32_t lost() const {
    return static_cast<std::int32_t>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(lost_)));
  }

 private:
  const WantedRing* rings_;
  std::int32_t taken_ = 0;
  std::int32_t lost_ = 0;
};

/// Claims the row of each lane that misses one, and lists it; returns how many there was no place for, rows of others
/// among them. Places are asked for before it is known whose the rows are: where a row is somebody else's, its place
/// has none (kNone), and counts as used.
__device__ inline std::int32_t enqueue(const LayerView& layer, PrefetchQueue& queue, std::uint32_t tag,
                                       std::int32_t places, bool missing, std::int32_t row) {
  const unsigned lanes = __ballot_sync(kAllLanes, missing);
  if (lanes == 0U) {
    return 0;
  }
  const std::int32_t before = missing ? claim_row(layer, row) : kPending;
  std::int32_t first = lane_index() == 0 ? atomicAdd(&queue.listed, __popc(lanes)) : 0;
  first = __shfl_sync(kAllLanes, first, 0);
  const std::int32_t place = first + rank_in(lanes);
  const bool claimed = missing && before == kNone;
  if (missing && place < places) {
    __stcg(reinterpret_cast<uint2*>(&queue.rows[place]), make_uint2(tag, static_cast<unsigned>(claimed ? row : kNone)));
  } else if (claimed) {
    give_up_row(layer, row);
  }
  return min(max(first + __popc(lanes) - places, 0), __popc(lanes));
}

/// Brings the map of a share's first key blocks into the L2 cache, before anything is looked up there. By a warp.
__device__ inline void bring_map(const ScoreParams& p, const Run& run) {
  constexpr std::int32_t kWords = ptx::kCacheLine / static_cast<std::int32_t>(sizeof(std::int32_t));
  static_assert(kTokensPerBlock == 2 * kWords);
  if (lane_index() < run.count) {
    const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(run.rows.entry) * p.step.table_stride;
    const std::int32_t block = table[run.first + lane_index()];
    if (block >= 0 && block < p.layer.host_rows / kTokensPerBlock) {
      const std::int32_t* words = p.layer.slot_of + static_cast<std::int64_t>(block) * kTokensPerBlock;
      ptx::prefetch(words);
      ptx::prefetch(words + kWords);
    }
  }
}

/// Of a warp in a thread block that scores so many key blocks. Whether a row is missing, and whether nobody else lists
/// it, is one access; whoever takes it from the queue fetches it or gives it up.
__device__ inline void list_missing(const ScoreParams& p, const SiftMemory& memory, std::int32_t share,
                                    PrefetchQueue& queue, const KernelErrorView& errors) {
  RingReader rings(memory.rings);
  const std::uint32_t tag = __ldcg(&queue.call) + 1U;
  const std::int32_t places = min(prefetch_cap(p, errors), kQueuePlaces);
  std::int32_t capped = 0;
  while (!too_late(memory, share)) {
    bool there = false;
    const WantedToken token = rings.take(there);
    if (!__any_sync(kAllLanes, there)) {
      __nanosleep(50);
      continue;
    }
    const std::int32_t row = there ? wanted_row(p, token) : kNone;
    // Most rows are resident, and an atomic operation costs more than a load.
    const bool missing = row != kNone && slot_word(p.layer, row).load(cuda::memory_order_relaxed) == kNone;
    capped += enqueue(p.layer, queue, tag, places, missing, row);
  }
  capped += rings.lost();
  __syncwarp();
  if (lane_index() == 0) {
    count(&p.layer.counters->prefetches_capped, capped);
    cuda::atomic_thread_fence(cuda::memory_order_release, cuda::thread_scope_device);
    atomicAdd(&queue.finished, 1);
  }
}

/// Leaves the queue as the next call needs it, and what the layer's next one wants to know; by one thread, when nobody
/// looks any more.
__device__ inline void reset(PrefetchQueue& queue, std::uint32_t call, ReplacementState& state) {
  state.asked = queue.listed;
  queue.listed = 0;
  queue.finished = 0;
  queue.dismissed = 0;
  const bool again = call + 1U == kLastCall;
  queue.call = again ? 0U : call + 1U;
#pragma unroll 1
  for (std::int32_t place = 0; again && place < kQueuePlaces; ++place) {
    queue.rows[place] = {};  // else what is old would come to have the tags of new calls
  }
}

/// Of a warp in a thread block that prefetches: every so many of the queue's rows are the block's. When nobody lists
/// any more, those that no warp has taken are given up.
__device__ inline void deal_rows(PrefetchQueue& queue, const ScoreParams& p, std::int32_t scorers,
                                 PrefetchBlock& block) {
  const std::int32_t blocks = static_cast<std::int32_t>(gridDim.x) - scorers;
  const std::int32_t own = static_cast<std::int32_t>(blockIdx.x) - scorers;
  const std::uint32_t call = __ldcg(&queue.call);
  std::int32_t seen = 0;   // places
  std::int32_t dealt = 0;  // rows in them
  bool all_listed = false;
  for (bool over = false; !over;) {
    // On their way together: whoever has seen that all have finished looks once more for what they have listed.
    std::int32_t finished = AtomicWord(queue.finished).load(cuda::memory_order_relaxed);
    const std::int32_t place = (seen + lane_index()) * blocks + own;
    uint2 entry = make_uint2(call, 0U);
    if (place < kQueuePlaces) {
      entry = __ldcg(reinterpret_cast<const uint2*>(&queue.rows[place]));
    }
    finished = __shfl_sync(kAllLanes, finished, 0);
    const unsigned missing = __ballot_sync(kAllLanes, entry.x != call + 1U);
    const std::int32_t fresh = missing == 0U ? kWarp : __ffs(static_cast<int>(missing)) - 1;
    const auto row = static_cast<std::int32_t>(entry.y);
    const unsigned rows = __ballot_sync(kAllLanes, lane_index() < fresh && row != kNone);
    if ((rows >> lane_index() & 1U) != 0U) {
      block.rows[dealt + rank_in(rows)] = row;
    }
    __syncwarp();
    seen += fresh;
    dealt += __popc(rows);
    over = all_listed && fresh == 0;
    if (lane_index() == 0) {
      show(block.dealt, dealt);
    }
    if (finished == scorers && !all_listed) {
      all_listed = true;  // and what was listed can be seen from now on
      cuda::atomic_thread_fence(cuda::memory_order_acquire, cuda::thread_scope_device);
      if (lane_index() == 0) {
        show(block.over, 1);
      }
    } else if (fresh == 0 && !over) {
      __nanosleep(100);
    }
  }
  std::int32_t taken = lane_index() == 0 ? atomicExch(&block.taken, kQueuePlaces) : 0;
  taken = __shfl_sync(kAllLanes, taken, 0);
  for (std::int32_t i = taken + lane_index(); i < dealt; i += kWarp) {
    give_up_row(p.layer, block.rows[i]);
  }
  if (lane_index() == 0 && atomicAdd(&queue.dismissed, 1) == blocks - 1) {
    reset(queue, call, *p.layer.replacement);
  }
}

/// Of the other warps there: takes what was dealt, as much as goes together, until it is over.
__device__ inline void fetch_dealt(const ScoreParams& p, std::int32_t scorers, std::int32_t warp,
                                   PrefetchBlock& block) {
  const auto own = static_cast<std::uint32_t>(static_cast<std::int32_t>(blockIdx.x) - scorers);
  const auto blocks = static_cast<std::uint32_t>(static_cast<std::int32_t>(gridDim.x) - scorers);
  const auto index = static_cast<std::uint32_t>(warp) * blocks + own;
  RowPrefetcher rows(p.layer, *p.step.tick + p.block.tick_offset, index, blocks * kFetchWarps, block.warps[warp]);
  while (look_at(block.over) == 0) {
    const std::int32_t taken = look_at(block.taken);
    const std::int32_t wanted = min(look_at(block.dealt) - taken, rows.at_once());
    std::int32_t before = kNone;
    if (lane_index() == 0 && wanted > 0) {
      before = atomicCAS(&block.taken, taken, taken + wanted);
    }
    if (__shfl_sync(kAllLanes, before, 0) == taken) {
      rows.fetch(lane_index() < wanted ? block.rows[taken + lane_index()] : kNone, wanted);
    } else if (wanted <= 0) {
      __nanosleep(100);
    }
  }
  rows.report(p.sift.prefetched);
}

/// All of a thread block that does not score, in memory that nobody else uses. So many others do.
__device__ inline void prefetch_rows(const ScoreParams& p, std::int32_t scorers, PrefetchQueue& queue,
                                     PrefetchBlock& block) {
  const int warp = warp_index();
  if (threadIdx.x == 0) {
    block.dealt = 0;
    block.taken = 0;
    block.over = 0;
  }
  __syncthreads();
  if (warp == 0) {
    deal_rows(queue, p, scorers, block);
  } else {
    fetch_dealt(p, scorers, warp - 1, block);
  }
}

/// Zeroes what the next call sifts into: each thread block some rows.
__device__ inline void clear_next(const ScoreParams& p) {
  static_assert(sizeof(RowSift) == sizeof(uint4));
  const auto first = static_cast<std::int32_t>(blockIdx.x) * kWarp + lane_index();
  for (std::int32_t row = first; p.sift.next_rows != nullptr && row < p.block.count;
       row += static_cast<std::int32_t>(gridDim.x) * kWarp) {
    *reinterpret_cast<uint4*>(p.sift.next_rows + row) = make_uint4(0U, 0U, 0U, 0U);
  }
  if (p.sift.next_prefetched != nullptr && first == 0) {
    *p.sift.next_prefetched = 0;
  }
}

}  // namespace echo
