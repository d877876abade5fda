#pragma once
// The prefetching warp of score: takes the tokens that the sifting warps of its thread block think will be selected,
// finds those whose rows are not resident, and fetches them (prefetch_rows.cuh). Rows that the pass appends are left
// out, since their host rows may not be written yet.
//
// It starts nothing that would not be done when the share is: what the last fetch took is compared with what is left,
// by the pace of the multiplying warps. So the launch does not end later than without prefetch, however slow the link.

#include "cache_manager/prefetch_rows.cuh"
#include "kernels/score_sift.cuh"

namespace echo {

/// The same for all lanes.
__device__ inline std::int64_t warp_clock() {
  std::int64_t cycles = 0;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return __shfl_sync(kAllLanes, cycles, 0);
}

/// Whether something that takes so many clock cycles would end behind the share, at the multipliers' pace so far.
class SharePace {
 public:
  __device__ SharePace(const ScoreProgress& progress, const RunList& list)
      : progress_(progress), list_(list), start_(warp_clock()) {}

  __device__ bool too_late(std::int64_t cycles) const {
    const std::int64_t done = progress_.available();
    const std::int64_t left = warp_load_acquired(list_.share) - done;
    return cycles * max(done, std::int64_t{1}) > (warp_clock() - start_) * left;
  }

 private:
  const ScoreProgress& progress_;
  const RunList& list_;
  std::int64_t start_;
};

/// Host row of a token, kNone if there is none or the pass appends it.
__device__ inline std::int32_t wanted_row(const ScoreParams& p, const WantedToken& token) {
  const std::int32_t first = token.entry * p.step.query_rows;
  for (std::int32_t row = first; row < first + p.step.query_rows; ++row) {
    if (p.step.positions[row] == token.position) {
      return kNone;
    }
  }
  const std::int32_t* table = block_table_of(p.step, first);
  const std::int32_t block = table[token.position / kTokensPerBlock];
  return block < 0 || block >= p.layer.host_rows / kTokensPerBlock ? kNone : host_row(table, token.position);
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

/// Takes up to 32 tokens from a ring, one for each lane; `there` says whether a lane has one.
__device__ inline WantedToken take_tokens(PrefetchRing& ring, bool& there) {
  const std::int32_t taken = ring.taken;
  const std::int32_t count = min(warp_load_acquired(ring.put) - taken, kWarp);
  there = lane_index() < count;
  const WantedToken token = there ? ring.tokens[(taken + lane_index()) % kRingPlaces] : WantedToken{};
  __syncwarp();
  if (count > 0 && lane_index() == 0) {
    store_released(ring.taken, taken + count);
  }
  __syncwarp();
  return token;
}

/// The warp's work.
template <typename Loader>
__device__ void prefetch_tokens(const ScoreParams& p, SiftShared& shared, PrefetchShared& memory, const RunList& list,
                                Loader& loader, const KernelErrorView& errors) {
  constexpr std::int64_t kFirstGuess = 6000;  // cycles of a fetch
  const SharePace pace(shared.progress, list);
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  RowPrefetcher rows(p.layer, now, {p.sift.prefetched, prefetch_cap(p, errors)}, memory);
  std::int64_t cycles = kFirstGuess;
  bool late = !(p.sift.prefetch_cap > 0.0F);
  int ring = 0;
  while (!loader.finished() || !late) {
    const bool loaded = loader.try_next();
    late = late || pace.too_late(cycles);
    if (late) {
      if (!loaded) {
        __nanosleep(500);
      }
      continue;
    }
    if (rows.has_room()) {
      ring = (ring + 1) % kSifters;
      bool there = false;
      const WantedToken token = take_tokens(shared.rings[ring], there);
      if (__any_sync(kAllLanes, there)) {
        rows.add(there ? wanted_row(p, token) : kNone);
      }
    }
    if (rows.waiting() > 0) {
      const std::int64_t begin = warp_clock();
      rows.fetch();
      cycles = max(warp_clock() - begin, cycles - cycles / 8);
    } else if (!loaded) {
      __nanosleep(100);
    }
  }
  rows.report();
}

/// Zeroes what the next call sifts into: each thread block some rows.
__device__ inline void clear_next(const ScoreParams& p) {
  constexpr int kPieces = sizeof(RowSift) / sizeof(uint4);
  for (std::int32_t row = static_cast<std::int32_t>(blockIdx.x); p.sift.next_rows != nullptr && row < p.block.count;
       row += static_cast<std::int32_t>(gridDim.x)) {
    auto* pieces = reinterpret_cast<uint4*>(p.sift.next_rows + row);
    for (int i = lane_index(); i < kPieces; i += kWarp) {
      pieces[i] = make_uint4(0U, 0U, 0U, 0U);
    }
  }
  if (p.sift.next_prefetched != nullptr && blockIdx.x == 0 && lane_index() == 0) {
    *p.sift.next_prefetched = 0;
  }
}

}  // namespace echo
