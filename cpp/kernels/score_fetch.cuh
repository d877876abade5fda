#pragma once
// The warps of score on Hopper that bring in what is multiplied: one fetches keys, some load queries.

#include <cstdint>

#include "kernels/score_runs.cuh"
#include "kernels/score_sift.cuh"
#include "kernels/score_stages.cuh"

namespace echo {

/// Up to 32 key blocks of a run; lane i knows the first token of the i-th, and where it lies, kNone if nowhere.
struct Span {
  std::int32_t group;  ///< of the thread block
  std::int32_t count;
  std::int32_t token;
  std::int32_t host_block;
  bool is_new;  ///< may hold new keys
};

__device__ inline Span span_at(const ScoreParams& p, const Run& run, std::int32_t done) {
  Span span{
      .group = run.queries, .count = min(run.count - done, kWarp), .token = 0, .host_block = kNone, .is_new = false};
  if (lane_index() < span.count) {
    const std::int32_t block = run.first + done + lane_index();
    span.token = block * kTokensPerBlock;
    span.is_new = run.is_new(block, p.step.query_rows);
    span.host_block = p.step.block_table[static_cast<std::int64_t>(run.rows.entry) * p.step.table_stride + block];
  }
  return span;
}

/// The fetching warp: has each key block copied into the next stage that is free, and says what to do with it. The
/// block table's entries of a span are loaded while the span before is on its way. `maker` is at the first run.
template <bool kKeeps>
__device__ void fetch_keys(const CUtensorMap& keys, const ScoreParams& p, RunMaker& maker, const ScoreStages& shared,
                           const KernelErrorView& errors) {
  constexpr std::int32_t kAhead = 3;  ///< key blocks of a span that go first, so that memory is soon busy
  // Rows of an entry that are not in this group will need the same keys soon.
  const std::uint64_t policy = ptx::create_policy(p.step.query_rows > shared.sizes.group_rows);
  const std::int64_t host_blocks = p.layer.host_rows / kTokensPerBlock;
  RingPlace place{.stage = 0};
  Run run = maker.run();
  Span span = span_at(p, run, 0);
  std::int32_t done = 0;
  bool next = true;  // whether the maker is to go to the next run
  bool more = true;
  bool appended = false;
#pragma unroll 1
  for (bool finished = false; !finished;) {
    const std::int32_t new_first = run.new_first;
    const std::int32_t new_count = run.new_count;
    if (next && more) {
      more = maker.next();
      next = false;
    }
    const Span now = span;
    bool good = false;
    if (lane_index() < now.count) {
      good = now.host_block >= 0 && now.host_block < host_blocks;
      if (!good) {
        errors.raise(KernelError::bad_position);
      }
    }
    const unsigned all_good = __ballot_sync(kAllLanes, good);
    const unsigned with_new = p.index_key == nullptr ? 0U : __ballot_sync(kAllLanes, now.is_new);
    const bool kept = kKeeps && new_first + new_count <= kKeptKeys;
#pragma unroll 1
    for (std::int32_t i = 0; i < now.count; ++i) {
      const std::int32_t host_block = __shfl_sync(kAllLanes, now.host_block, i);
      const std::int32_t token = __shfl_sync(kAllLanes, now.token, i);
      const bool there = (all_good >> static_cast<unsigned>(i) & 1U) != 0U;
      const bool is_new = (with_new >> static_cast<unsigned>(i) & 1U) != 0U;
      if (is_new && !kept && !appended) {
        shared.new_keys->wait(0);
        appended = true;
      }
      if (there) {
        shared.empty[place.stage].wait(place.parity ^ 1U);
        if (ptx::elect()) {
          shared.work[place.stage] = {
              .group = now.group, .token = token, .new_first = new_first, .new_count = is_new && kept ? new_count : 0};
          shared.full[place.stage].arrive_expecting(kMapBlockBytes);
          std::byte* to = shared.keys + place.stage * kStageBytes;
          ptx::copy_box(to, keys, 0, 0, host_block, shared.full[place.stage], policy);
        }
        __syncwarp();
        place.advance(1, shared.stages);
      }
      if (i == min(now.count - 1, kAhead)) {
        done += now.count;
        if (done == run.count && more) {
          run = maker.run();
          done = 0;
          next = true;
        }
        finished = done == run.count;
        if (!finished) {
          span = span_at(p, run, done);
        }
      }
    }
  }
  for (int i = 0; i < kMultipliers; ++i) {  // each finds one of these next
    shared.empty[place.stage].wait(place.parity ^ 1U);
    if (ptx::elect()) {
      shared.work[place.stage] = {.group = span.group, .token = kNone, .new_first = 0, .new_count = 0};
      shared.full[place.stage].arrive();
    }
    __syncwarp();
    place.advance(1, shared.stages);
  }
}

inline constexpr int kHeadsInFlight = 3;  ///< of 8 lanes, bf16; of f32 it is one

template <int kHeads, typename Free>
__device__ void load_queries_of(const ScoreParams& p, const GroupRows& rows, std::int32_t group, int warp, int warps,
                                const ScoreStages& shared, const KernelErrorView& errors, Free free) {
  const GroupQueries to = shared.queries_of(group);
  if (p.index_q_dtype == DType::f32) {
    load_queries<kHeads, 1, float>(p, rows, to, warp, warps, errors, free);
  } else {
    load_queries<kHeads, kHeadsInFlight, std::uint16_t>(p, rows, to, warp, warps, errors, free);
  }
  ptx::fence_proxy_async();
}

/// The first group's queries, by the multiplying warps; with sifting one of those that have the least of them to load
/// brings the bounds.
template <int kHeads, bool kSift>
__device__ void load_first_queries(const ScoreParams& p, const RunMaker& maker, const ScoreStages& shared,
                                   const KernelErrorView& errors) {
  const Run& run = maker.run();
  if (kSift && warp_index() == kMultiplierWarps - 2) {  // the last one loads lengths
    put_bounds(p, run, find_bounds(p, run, errors), maker.prefetch_margin(), sift_memory(shared).bounds[0]);
  }
  load_queries_of<kHeads>(p, run.rows, 0, warp_index(), kMultiplierWarps, shared, errors, [] {});
  meet(kStart, kMultiplierWarps * kWarp);
}

/// A loading warp's share of the queries of all groups but the first; with sifting, also their bounds.
template <int kHeads, bool kSift>
__device__ void load_next_queries(const ScoreParams& p, RunMaker& maker, const ScoreStages& shared,
                                  const KernelErrorView& errors) {
  const int warp = warp_index() - kFetcher - 1;
  while (maker.next()) {
    const Run& run = maker.run();
    const int buffer = run.queries % kBuffers;
    const auto wait_for_buffer = [&] {
      if (run.queries >= kBuffers) {
        shared.queries_empty[buffer].wait((static_cast<std::uint32_t>(run.queries / kBuffers) - 1U) & 1U);
      }
    };
    RunBounds bounds{};
    if (kSift && warp == 0) {
      bounds = find_bounds(p, run, errors);  // on their way while queries are
    }
    load_queries_of<kHeads>(p, run.rows, run.queries, warp, kQueryLoaders, shared, errors, wait_for_buffer);
    if (kSift && warp == 0) {
      put_bounds(p, run, bounds, maker.prefetch_margin(), sift_memory(shared).bounds[buffer]);
    }
    __syncwarp();
    if (lane_index() == 0) {
      shared.queries_full[buffer].arrive();
    }
  }
}

}  // namespace echo
