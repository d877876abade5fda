#pragma once
// The warps of score on Hopper that bring in what is multiplied: one fetches keys, some load queries.

#include <cstdint>

#include "kernels/score_stages.cuh"

namespace echo {

/// Up to 32 key blocks of a group, and where lane i finds the i-th.
struct Span {
  std::int32_t group;  ///< of the thread block
  std::int32_t row;    ///< of the row block
  std::int32_t rows;
  std::int32_t block;
  std::int32_t count;
  std::int32_t host_block;
};

__device__ inline Span span_at(const ScoreParams& p, const GroupWalk& walk, std::int32_t group, std::int32_t done) {
  const GroupRows rows = walk.rows();
  Span span{.group = group,
            .row = rows.first - p.block.first,
            .rows = rows.last - rows.first,
            .block = walk.block() + done,
            .count = min(walk.count() - done, kWarp),
            .host_block = kNone};
  if (lane_index() < span.count) {
    const std::int64_t table = static_cast<std::int64_t>(rows.entry) * p.step.table_stride;
    span.host_block = p.step.block_table[table + span.block + lane_index()];
  }
  return span;
}

/// The fetching warp: has each key block copied into the next stage that is free, and says what to do with it. The
/// block table's entries of a span are loaded while the span before is on its way.
__device__ inline void fetch_keys(const CUtensorMap& keys, const ScoreParams& p, GroupWalk& walk,
                                  const ScoreStages& shared, const KernelErrorView& errors) {
  // Rows of an entry that are not in this group will need the same keys soon.
  const std::uint64_t policy = cache_policy(p.step.query_rows > shared.sizes.group_rows);
  const std::int64_t host_blocks = p.layer.host_rows / kTokensPerBlock;
  RingPlace place{.stage = 0};
  const auto hand_over = [&](const StageWork& work, std::int32_t host_block) {
    if (lane_index() == 0) {
      wait(shared.empty[place.stage], place.parity ^ 1U);
      shared.work[place.stage] = work;
      if (work.rows == 0) {
        arrive(shared.full[place.stage]);
      } else {
        arrive_expecting(shared.full[place.stage], kMapBlockBytes);
        copy_box(shared.keys + place.stage * kStageBytes, keys, 0, 0, host_block, shared.full[place.stage], policy);
      }
    }
    place.advance(1, shared.stages);
  };

  Span span = span_at(p, walk, 0, 0);
  std::int32_t done = 0;
  for (bool more = true; more;) {
    const Span now = span;
    done += now.count;
    std::int32_t group = now.group;
    if (done == walk.count()) {
      more = walk.next();
      ++group;
      done = 0;
    }
    if (more) {
      span = span_at(p, walk, group, done);
    }
    if (lane_index() < now.count && (now.host_block < 0 || now.host_block >= host_blocks)) {
      errors.raise(KernelError::bad_position);
    }
    for (std::int32_t i = 0; i < now.count; ++i) {
      const std::int32_t host_block = __shfl_sync(kAllLanes, now.host_block, i);
      if (host_block >= 0 && host_block < host_blocks) {
        hand_over({.group = now.group, .row = now.row, .rows = now.rows, .token = (now.block + i) * kTokensPerBlock},
                  host_block);
      }
    }
  }
  for (int i = 0; i < kMultipliers; ++i) {  // each finds one of these next
    hand_over({.group = span.group, .row = 0, .rows = 0, .token = 0}, 0);
  }
}

/// All warps but the fetching one load the queries of the first group; the loading warps then go on with the others,
/// a group ahead of the multiplication.
template <int kHeads>
__device__ void fill_queries(const ScoreParams& p, GroupWalk& walk, const ScoreStages& shared,
                             const KernelErrorView& errors) {
  const bool loader = warp_index() > kFetcher;
  int warp = loader ? warp_index() - 1 : warp_index();
  int warps = kMultiplierWarps + kLoaderWarps;
#pragma unroll 1
  for (std::int32_t group = 0;; ++group) {
    load_queries<kHeads>(p, walk.rows(), warp, warps, shared.queries_of(group), errors);
    publish_shared_writes();
    if (group == 0) {
      join(kStart, kScoreThreads - kWarp);
      warp = warp_index() - kFetcher - 1;
      warps = kLoaderWarps;
    } else {
      arrive(shared.queries_full[group % kBuffers]);
    }
    if (!loader || !walk.next()) {
      return;
    }
    const std::int32_t next = group + 1;
    wait(shared.queries_empty[next % kBuffers], (static_cast<std::uint32_t>(next / kBuffers) & 1U) ^ 1U);
  }
}

}  // namespace echo
