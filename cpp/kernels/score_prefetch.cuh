#pragma once
// The prefetching warp of score: takes the tokens that the multiplying warps of its thread block think will be
// selected, finds those whose rows are not resident, and fetches them (prefetch_rows.cuh). Rows that the pass appends
// are left out, since their host rows may not be written yet.
//
// It starts nothing that would not be done when the share is: what the last fetch took is compared with what is left
// to score. So the launch does not end much later than without prefetch, however slow the link: 0.3 to 1.5 us where
// nothing is missing, 4 where 890 rows come while 13 x 100K tokens are scored (H200). More warps would fetch more, but
// reads of the host beyond what the link carries hold up those of keys.

#include "cache_manager/prefetch_rows.cuh"
#include "kernels/score_sift.cuh"

namespace echo {

/// The same for all lanes.
__device__ inline std::int64_t warp_clock() {
  std::int64_t cycles = 0;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return __shfl_sync(kAllLanes, cycles, 0);
}

/// A word of shared memory that another warp shows, the same for all lanes.
__device__ inline std::int32_t look_at(const std::int32_t& word) {
  return __shfl_sync(kAllLanes, ptx::load_shared_volatile(ptx::shared_address(&word)), 0);
}

/// Whether something that takes so many clock cycles would end behind a share of so many key blocks.
__device__ inline bool too_late(const SiftMemory& memory, std::int32_t share, std::int64_t cycles) {
  constexpr std::int64_t kBlockCycles = 450;  // of a key block, while all multiprocessors read at the memory's speed
  std::int32_t left = share;
#pragma unroll
  for (const std::int32_t& finished : memory.finished) {
    left -= look_at(finished);
  }
  return look_at(memory.fetched) != 0 || cycles > left * kBlockCycles;
}

/// Host row of a token, kNone if there is none or the pass appends it. What was read from a ring may be anything.
__device__ inline std::int32_t wanted_row(const ScoreParams& p, const WantedToken& token) {
  const std::int32_t index = token.position / kTokensPerBlock;
  if (token.row < 0 || token.row >= p.block.count || token.position < 0 || index >= p.step.table_stride) {
    return kNone;
  }
  const std::int32_t first = (p.block.first + token.row) / p.step.query_rows * p.step.query_rows;
  const std::int32_t* table = block_table_of(p.step, first);
  const std::int32_t block = table[index];
  bool good = token.position <= p.step.positions[p.block.first + token.row];
  for (std::int32_t row = first; row < first + p.step.query_rows; ++row) {
    good = good && p.step.positions[row] != token.position;
  }
  good = good && block >= 0 && block < p.layer.host_rows / kTokensPerBlock;
  return good ? host_row(table, token.position) : kNone;
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
    WantedToken token{kNone, kNone};
    if (there) {
      const WantedToken& at = rings_[ring].tokens[place % kRingPlaces];
      token = {ptx::load_shared_volatile(ptx::shared_address(&at.row)),
               ptx::load_shared_volatile(ptx::shared_address(&at.position))};
    }
    taken_ += min(fresh, max(kWarp - (up_to - fresh), 0));
    return token;
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

/// The warp's work, for a share of so many key blocks.
__device__ inline void prefetch_tokens(const ScoreParams& p, SiftMemory& memory, std::int32_t share,
                                       const KernelErrorView& errors) {
  constexpr std::int64_t kFirstGuess = 8000;  // cycles of a fetch
  if (!(p.sift.prefetch_cap > 0.0F)) {
    return;
  }
  RingReader rings(memory.rings);
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  RowPrefetcher rows(p.layer, now, {p.sift.prefetched, prefetch_cap(p, errors)}, memory.prefetch);
  std::int64_t cycles = kFirstGuess;
  while (!too_late(memory, share, cycles)) {
    bool there = false;
    if (!rows.ready()) {
      const WantedToken token = rings.take(there);
      if (__any_sync(kAllLanes, there)) {
        rows.add(there ? wanted_row(p, token) : kNone);
      }
    }
    if (rows.waiting() > 0) {
      const std::int64_t begin = warp_clock();
      rows.fetch();
      cycles = max(warp_clock() - begin, cycles - cycles / 8);
    } else if (!__any_sync(kAllLanes, there)) {
      __nanosleep(200);
    }
  }
  rows.report(rings.lost());
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
