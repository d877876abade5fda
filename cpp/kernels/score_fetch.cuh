#pragma once
// The warps of score on Hopper that bring in what is multiplied: one fetches keys, some load queries.

#include <cstdint>

#include "kernels/score_stages.cuh"

namespace echo {

/// Up to 32 key blocks of a group; lane i knows where the i-th lies, kNone if nowhere.
struct Span {
  std::int32_t group;  ///< of the thread block
  std::int32_t block;
  std::int32_t count;
  std::int32_t host_block;
};

__device__ inline Span span_at(const ScoreParams& p, const GroupWalk& walk, std::int32_t group, std::int32_t done) {
  Span span{
      .group = group, .block = walk.block() + done, .count = min(walk.count() - done, kWarp), .host_block = kNone};
  if (lane_index() < span.count) {
    const std::int64_t table = static_cast<std::int64_t>(walk.rows().entry) * p.step.table_stride;
    span.host_block = p.step.block_table[table + span.block + lane_index()];
  }
  return span;
}

/// The fetching warp: has each key block copied into the next stage that is free, and says what to do with it. The
/// block table's entries of a span are loaded while the span before is on its way.
__device__ inline void fetch_keys(const CUtensorMap& keys, const ScoreParams& p, GroupWalk& walk,
                                  const ScoreStages& shared, const KernelErrorView& errors) {
  constexpr std::int32_t kAhead = 3;  ///< key blocks of a span that go first, so that memory is soon busy
  // Rows of an entry that are not in this group will need the same keys soon.
  const std::uint64_t policy = cache_policy(p.step.query_rows > shared.sizes.group_rows);
  const std::int64_t host_blocks = p.layer.host_rows / kTokensPerBlock;
  RingPlace place{.stage = 0};
  Span span = span_at(p, walk, 0, 0);
  std::int32_t done = 0;
  std::int32_t group = 0;
  for (bool more = true; more;) {
    const Span now = span;
    bool good = false;
    if (lane_index() < now.count) {
      good = now.host_block >= 0 && now.host_block < host_blocks;
      if (!good) {
        errors.raise(KernelError::bad_position);
      }
    }
    const unsigned all_good = __ballot_sync(kAllLanes, good);
#pragma unroll 1
    for (std::int32_t i = 0; i < now.count; ++i) {
      const std::int32_t host_block = __shfl_sync(kAllLanes, now.host_block, i);
      if ((all_good >> static_cast<unsigned>(i) & 1U) != 0U) {
        wait(shared.empty[place.stage], place.parity ^ 1U);
        if (elect_lane()) {
          shared.work[place.stage] = {.group = now.group, .token = (now.block + i) * kTokensPerBlock};
          arrive_expecting(shared.full[place.stage], kMapBlockBytes);
          std::byte* to = shared.keys + place.stage * kStageBytes;
          copy_box(to, keys, 0, 0, host_block, shared.full[place.stage], policy);
        }
        __syncwarp();
        place.advance(1, shared.stages);
      }
      if (i == min(now.count - 1, kAhead)) {
        done += now.count;
        if (done == walk.count()) {
          more = walk.next();
          ++group;
          done = 0;
        }
        if (more) {
          span = span_at(p, walk, group, done);
        }
      }
    }
  }
  for (int i = 0; i < kMultipliers; ++i) {  // each finds one of these next
    wait(shared.empty[place.stage], place.parity ^ 1U);
    if (elect_lane()) {
      shared.work[place.stage] = {.group = span.group, .token = kNone};
      arrive(shared.full[place.stage]);
    }
    __syncwarp();
    place.advance(1, shared.stages);
  }
}

inline constexpr int kHeadsInFlight = 3;  ///< of 8 lanes, bf16; of f32 it is one

template <int kHeads, typename Free>
__device__ void load_queries_of(const ScoreParams& p, QueryLoad load, std::int32_t group, int warp, int warps,
                                const ScoreStages& shared, const KernelErrorView& errors, Free free) {
  const auto place_of = [&](bool other) { return shared.queries_of(group + (other ? 1 : 0)); };
  if (p.index_q_dtype == DType::f32) {
    load_queries<kHeads, 1, float>(p, load, warp, warps, errors, place_of, free);
  } else {
    load_queries<kHeads, kHeadsInFlight, std::uint16_t>(p, load, warp, warps, errors, place_of, free);
  }
  publish_shared_writes();
}

/// All warps but the fetching one load the queries of the first groups, as many as there are buffers, so that those of
/// the second are there however soon the first ends. The loading warps then go on with the others.
template <int kHeads>
__device__ void fill_queries(const ScoreParams& p, GroupWalk& walk, const ScoreStages& shared,
                             const KernelErrorView& errors) {
  static_assert(kBuffers == 2);
  const bool loader = warp_index() > kFetcher;
  int warp = loader ? warp_index() - 1 : warp_index();
  int warps = kOtherWarps;
  QueryLoad load{.first = walk.rows(), .second = {}};
  bool more = walk.next();
  if (more) {
    load.second = walk.rows();
  }
#pragma unroll 1
  for (std::int32_t group = 0;;) {
    load_queries_of<kHeads>(p, load, group, warp, warps, shared, errors, [&] {
      if (group != 0) {
        wait(shared.queries_empty[group % kBuffers], (static_cast<std::uint32_t>(group / kBuffers) - 1U) & 1U);
      }
    });
    if (group == 0) {
      join(kStart, kOtherWarps * kWarp);
      if (!loader || !more) {
        return;
      }
      warp = warp_index() - kFetcher - 1;
      warps = kLoaderWarps;
      group = kBuffers;
    } else {
      __syncwarp();
      if (lane_index() == 0) {
        arrive(shared.queries_full[group % kBuffers]);
      }
      ++group;
    }
    if (!walk.next()) {
      return;
    }
    load = {.first = walk.rows(), .second = {}};
  }
}

}  // namespace echo
