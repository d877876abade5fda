#pragma once
// Score on Hopper where it neither writes new keys nor sifts, and the rows of a session fit in one product. What
// score_groups.cuh, score_runs.cuh, score_fetch.cuh and score_multiply.cuh do, with as few instructions as possible:
// those before the first key block is asked for take as long as memory does to bring it, and those of each key block
// cost power that the memory then lacks where calls are long. What few calls need is out of line; with a key block goes
// one word, where it lies or that it lies nowhere, as each warp counts along its thread block's part by itself.
// Cost: 135 instructions of a multiplying warp for 64 keys and 64 heads, 84 of them for the sum. To ask for a key
// block takes a warp 350 cycles, as long as memory does: in long shares two warps take turns. In short ones the second
// one loads queries, which come late behind keys that are asked for together.

#include <cstdint>

#include "kernels/score_multiply.cuh"
#include "kernels/score_plain_shares.cuh"
#include "kernels/score_stages.cuh"

namespace echo {

/// Two warps fetch where a thread block has so many key blocks, of a row per session, and rarely goes on to another
/// entry, for whose queries a loading warp less is left then. With two rows the multiplying warps need the time in
/// which instructions are issued.
inline constexpr std::int32_t kLongShare = 64;
inline constexpr int kLoadsInFlight = 6;  ///< of a warp that loads further queries: all heads, where three do

/// A fetching warp, the `which`-th of 2^log_of: lanes bring the block table's entries of up to 32 of its key blocks to
/// shared memory, those of the next ones while these are on their way; one lane has each block copied into its stage.
/// `walk` is at the first entry.
template <int kRows>
__device__ __forceinline__ void fetch_plain(const CUtensorMap& keys, const ScoreParams& p, const EntryShares& shares,
                                            EntryWalk<kRows>& walk, const ScoreStages& shared,
                                            const KernelErrorView& errors, std::int32_t which, std::int32_t log_of) {
  constexpr std::int32_t kAhead = 4;  ///< key blocks that go first, so that memory is soon busy
  constexpr std::uint32_t kWord = sizeof(std::int32_t);
  std::int32_t next = walk.first() + which;  // block of the entry
  std::int32_t end = walk.first() + walk.count();
  const auto entry_of_lane = [&] {
    const std::int32_t* table = p.step.block_table + static_cast<std::int64_t>(walk.entry()) * p.step.table_stride;
    return table[min(next + (lane_index() << log_of), end - 1)];
  };
  std::int32_t host_block = entry_of_lane();
  // Rows of an entry that are not in this call will need the same keys soon.
  const std::uint64_t policy = ptx::create_policy(p.step.query_rows > kRows);
  const std::uint32_t stage_keys = agreed_address(shared.keys);
  const std::uint32_t full = agreed_address(shared.full);
  const std::uint32_t empty = agreed_address(shared.empty);
  const std::uint32_t there = agreed_address(shared.work);
  const std::uint32_t blocks = stage_keys + kMapBlockBytes + static_cast<std::uint32_t>(which * kWarp) * kWord;
  RingPlace place{.stage = which};
  join(kBarriersMade, kScoreThreads);
#pragma unroll 1
  for (bool finished = false; !finished;) {
    if (static_cast<std::uint32_t>(host_block) >= shares.host_blocks) [[unlikely]] {
      raise_bad_position(errors.words);
      host_block = kNone;  // outside of the map: the copy engine brings zeros
    }
    __syncwarp();
    ptx::store_shared(blocks + static_cast<std::uint32_t>(lane_index()) * kWord,
                      static_cast<std::uint32_t>(host_block));
    __syncwarp();
    const std::int32_t count = min((end - next + (1 << log_of) - 1) >> log_of, kWarp);
    std::uint32_t from = blocks;
    std::uint32_t to = blocks + static_cast<std::uint32_t>(min(count, kAhead)) * kWord;
#pragma unroll 1
    for (bool ahead = true;; ahead = false) {
      if (from != to) {
        if (ptx::elect()) {
          std::uint32_t coming = ptx::load_shared(from);
#pragma unroll 1
          do {
            const std::uint32_t block = coming;
            from += kWord;
            coming = ptx::load_shared(from);
            ptx::MbarrierAt(empty, place.stage).wait(place.parity ^ 1U);
            ptx::store_shared(there + static_cast<std::uint32_t>(place.stage) * kWord, block);
            const ptx::MbarrierAt now_full(full, place.stage);
            now_full.arrive_expecting(kMapBlockBytes);
            ptx::copy_box(stage_keys + static_cast<std::uint32_t>(place.stage * kStageBytes), keys, 0, 0,
                          static_cast<std::int32_t>(block), now_full, policy);
            place.advance(1 << log_of, shared.stages);
          } while (from != to);
        }
        __syncwarp();
      }
      if (!ahead) {
        break;
      }
      from = to;
      to = blocks + static_cast<std::uint32_t>(count) * kWord;
      next += count << log_of;
      while (next >= end && !finished) {
        next -= end;  // blocks of the next entry that come before
        finished = !walk.next();
        next += walk.first();
        end = walk.first() + walk.count();
      }
      if (!finished) {
        host_block = entry_of_lane();
      }
    }
  }
}

/// A warpgroup: every kMultipliers-th key block of the thread block's part. `walk` is at the first entry.
template <int kHeads, int kRows>
__device__ __forceinline__ void multiply_plain(const ScoreParams& p, EntryWalk<kRows>& walk,
                                               const ScoreStages& shared) {
  constexpr int kFours = kHeads / 16;       ///< float4 of weights of a row that a lane needs
  constexpr std::uint32_t kStep = 32;       ///< dimensions of a product
  constexpr std::uint32_t kDescribed = 16;  ///< bytes that a descriptor counts in
  constexpr std::int32_t kNext = kMultipliers * kTokensPerBlock;
  const int warp = warp_index();
  const std::int32_t in_block = warp % kGroupWarps * 16 + lane_index() / 4 + lane_index() % 2 * 8;
  const std::uint32_t stage_keys = agreed_address(shared.keys);
  const std::uint32_t keys_word = ptx::k_major_word(stage_keys);
  const std::uint32_t scales = kept(stage_keys + scale_byte(in_block));
  const std::uint32_t there = agreed_address(shared.work);
  const std::uint32_t full = agreed_address(shared.full);
  const std::uint32_t empty = agreed_address(shared.empty);
  std::int32_t skip = agreed(warp / kGroupWarps);  // key blocks of the entry that come before the warpgroup's next one
  RingPlace place{.stage = skip};
  const bool tells = lane_index() == 0;
#pragma unroll 1
  for (;;) {
    const GroupQueries queries = shared.queries_of(walk.queries());
    float4 weights[kRows * kFours];
#pragma unroll
    for (int i = 0; i < kRows * kFours; ++i) {
      weights[i] = (reinterpret_cast<const float4*>(queries.weights) + lane_index() % 4)[i * 4];
    }
    LaneRows<kRows> rows{};
    rows.set(p, queries, 0, in_block);
    const std::uint32_t queries_word = kept(ptx::k_major_word(ptx::shared_address(queries.codes)));
    // Tokens from the first one of the run on.
    const std::int32_t behind = kept(walk.count() * kTokensPerBlock);
    const std::int32_t limit = rows.limit[0] - walk.first() * kTokensPerBlock;
    float* const out = kept(rows.out[0] + static_cast<std::int64_t>(walk.first()) * kTokensPerBlock);
    std::int32_t token = skip * kTokensPerBlock;
#pragma unroll 1
    for (; token < behind; token += kNext) {
      ptx::MbarrierAt(full, place.stage).wait(place.parity);
      const auto stage = static_cast<std::uint32_t>(place.stage);
      const std::uint32_t key_operand = agreed(keys_word + stage * (kStageBytes / kDescribed));
      const std::uint32_t query_operand = agreed(queries_word);
      const float scale = float_of(ptx::load_shared(scales + stage * kStageBytes));
      const auto host_block = static_cast<std::int32_t>(ptx::load_shared(there + stage * 4U));
      float dots[kRows][kHeads / 2];  // a product each: the first row is summed up while the second one's is made
      ptx::wgmma_fence();
#pragma unroll
      for (std::uint32_t row = 0; row < kRows; ++row) {
#pragma unroll
        for (std::uint32_t from = 0; from < kQueryDim; from += kStep) {
          ptx::wgmma_e4m3(dots[row], ptx::k_major_of(key_operand + from / kDescribed),
                          ptx::k_major_of(query_operand + (row * kHeads * kQueryDim + from) / kDescribed), from > 0);
        }
        ptx::wgmma_commit();
      }
      float sums[kRows];
      if constexpr (kRows == 2) {
        ptx::wgmma_wait<1>();
        ptx::pin(dots[0]);
        sums[0] = sum_heads<kHeads, 1>(dots[0], weights);
      }
      ptx::wgmma_wait<0>();
      ptx::pin(dots[kRows - 1]);
      __syncwarp();
      if (tells) {
        ptx::MbarrierAt(empty, place.stage).arrive();
      }
      sums[kRows - 1] = sum_heads<kHeads, 1>(dots[kRows - 1], weights + (kRows - 1) * kFours);
      const float score = sum_lanes(sums[0], sums[kRows - 1]) * scale;
      if (token < limit && host_block != kNone) {
        ptx::store_streaming(out + token, score);
      }
      const std::int32_t wrapped = place.stage + kMultipliers - shared.stages;
      place.parity ^= wrapped >= 0 ? 1U : 0U;
      place.stage = wrapped >= 0 ? wrapped : place.stage + kMultipliers;
    }
    skip = (token - behind) / kTokensPerBlock;
    const std::int32_t left = walk.queries();
    if (!walk.next()) {
      return;
    }
    __syncwarp();
    if (tells) {
      shared.queries_empty[left % kBuffers].arrive();
    }
    const std::int32_t entered = walk.queries();
    shared.queries_full[entered % kBuffers].wait((static_cast<std::uint32_t>(entered + 1) / kBuffers - 1U) & 1U);
  }
}

/// Queries of f32, which models do not have: a function of its own. Waits for the phase of `parity` of `free`, if there
/// is such a barrier.
template <int kHeads>
__device__ __noinline__ void load_f32_queries(const ScoreParams& p, GroupRows rows, GroupQueries to, int warp,
                                              int warps, const KernelErrorView& errors, ptx::Mbarrier* free,
                                              std::uint32_t parity) {
  load_queries<kHeads, 1, float>(p, rows, to, warp, warps, errors, [&] {
    if (free != nullptr) {
      free->wait(parity);
    }
  });
}

/// The queries of the walk's entry, by `warps` warps of which each has up to kInFlight times four heads on their way.
template <int kHeads, int kInFlight, int kRows>
__device__ __forceinline__ void load_plain_queries(const ScoreParams& p, const EntryWalk<kRows>& walk, int warp,
                                                   int warps, const ScoreStages& shared,
                                                   const KernelErrorView& errors) {
  const std::int32_t queries = walk.queries();
  const GroupQueries to = shared.queries_of(queries);
  ptx::Mbarrier* free = queries >= kBuffers ? &shared.queries_empty[queries % kBuffers] : nullptr;
  const std::uint32_t parity = (static_cast<std::uint32_t>(queries / kBuffers) - 1U) & 1U;
  if (p.index_q_dtype == DType::f32) [[unlikely]] {
    load_f32_queries<kHeads>(p, walk.rows(), to, warp, warps, errors, free, parity);
  } else {
    load_queries<kHeads, kInFlight, std::uint16_t>(p, walk.rows(), to, warp, warps, errors, [&] {
      if (free != nullptr) {
        free->wait(parity);
      }
    });
  }
  ptx::fence_proxy_async();
}

/// The queries of all entries but the first, by `warps` warps.
template <int kHeads, int kRows>
__device__ __forceinline__ void load_further_queries(const ScoreParams& p, EntryWalk<kRows>& walk, int warp, int warps,
                                                     const ScoreStages& shared, const KernelErrorView& errors) {
  while (walk.next()) {
    load_plain_queries<kHeads, kLoadsInFlight>(p, walk, warp, warps, shared, errors);
    __syncwarp();
    if (lane_index() == 0) {
      shared.queries_full[walk.queries() % kBuffers].arrive();
    }
  }
}

}  // namespace echo
