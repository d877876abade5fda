#pragma once
// The warps of score on Hopper that bring in what is multiplied: one fetches keys, some load queries.

#include <cstdint>
#include <limits>

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

inline constexpr int kAtOnce = 4;                ///< key blocks of a long share that are asked for together
inline constexpr std::int32_t kLongShare = 128;  ///< key blocks
/// Of what is no key block: no row is so long.
inline constexpr std::int32_t kFarToken = std::numeric_limits<std::int32_t>::max() - kTokensPerBlock;

/// Has up to kMost key blocks of a span, from the i-th on, copied into the next stages, each as soon as it is free.
/// `newer`: those of them that may hold new keys, which only then are named.
template <int kMost>
__device__ void ask_for(const CUtensorMap& keys, const ScoreStages& shared, const Span& span, std::int32_t i,
                        std::int32_t count, StageWork work, unsigned newer, RingPlace place, std::uint64_t policy) {
  const std::int32_t new_count = work.new_count;
  std::int32_t tokens[kMost];
  std::int32_t host_blocks[kMost];
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    tokens[k] = __shfl_sync(kAllLanes, span.token, i + k);
    host_blocks[k] = __shfl_sync(kAllLanes, span.host_block, i + k);
  }
  if (kMost == 1) {
    shared.empty[place.stage].wait(place.parity ^ 1U);
  }
  if (ptx::elect()) {
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k < count) {
        if (kMost > 1) {
          shared.empty[place.stage].wait(place.parity ^ 1U);
        }
        work.token = tokens[k];
        work.new_count = (newer >> static_cast<unsigned>(k) & 1U) != 0U ? new_count : 0;
        shared.work[place.stage] = work;
        shared.full[place.stage].arrive_expecting(kMapBlockBytes);
        std::byte* to = shared.keys + place.stage * kStageBytes;
        ptx::copy_box(to, keys, 0, 0, host_blocks[k], shared.full[place.stage], policy);
        place.advance(1, shared.stages);
      }
    }
  }
  __syncwarp();
}

/// The fetching warp: has key blocks copied into the stages of the ring, and says what to do with them. To ask for one
/// takes about as long as memory needs for it, most of it waiting for shared memory; in a long share, four are asked
/// for together. In a short one that takes longer: memory serves some thread blocks late, and the queries of a second
/// group behind those keys. The block table's entries of a span are loaded while the span before is on its way. `maker`
/// is at the first run.
template <bool kKeeps>
__device__ void fetch_keys(const CUtensorMap& keys, const ScoreParams& p, RunMaker& maker, const ScoreStages& shared,
                           const KernelErrorView& errors) {
  // Rows of an entry that are not in this group will need the same keys soon.
  const std::uint64_t policy = ptx::create_policy(p.step.query_rows > shared.sizes.group_rows);
  const std::int64_t host_blocks = p.layer.host_rows / kTokensPerBlock;
  const bool long_share = maker.left() >= kLongShare;
  RingPlace place{.stage = 0};
  Run run = maker.run();
  Span span = span_at(p, run, 0);
  std::int32_t done = 0;
  bool next = true;  // whether the maker is to go to the next run
  bool more = true;
  bool appended = false;
#pragma unroll 1
  for (bool finished = false; !finished;) {
    const bool kept = kKeeps && run.new_first + run.new_count <= kKeptKeys;
    const StageWork work{
        .group = span.group, .token = 0, .new_first = run.new_first, .new_count = kept ? run.new_count : 0};
    if (next && more) {
      more = maker.next();
      next = false;
    }
    Span now = span;
    if (lane_index() < now.count && (now.host_block < 0 || now.host_block >= host_blocks)) {
      errors.raise(KernelError::bad_position);
      now.token = kFarToken;  // the copy engine brings zeros
    }
    const unsigned with_new = p.index_key == nullptr ? 0U : __ballot_sync(kAllLanes, now.is_new);
#pragma unroll 1
    for (std::int32_t i = 0, count = 0; i < now.count; i += count) {
      count = long_share ? min(now.count - i, kAtOnce) : 1;
      const unsigned newer = with_new >> static_cast<unsigned>(i);
      if (!kept && !appended && (newer & ((1U << static_cast<unsigned>(count)) - 1U)) != 0U) {
        shared.new_keys->wait(0);
        appended = true;
      }
      if (long_share) {
        ask_for<kAtOnce>(keys, shared, now, i, count, work, newer, place, policy);
      } else {
        ask_for<1>(keys, shared, now, i, count, work, newer, place, policy);
      }
      place.advance(count, shared.stages);
      if (i == 0) {
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
    put_bounds(p, run, find_bounds(p, run, errors), maker.prefetches(), sift_memory(shared).bounds[0]);
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
      put_bounds(p, run, bounds, maker.prefetches(), sift_memory(shared).bounds[buffer]);
    }
    __syncwarp();
    if (lane_index() == 0) {
      shared.queries_full[buffer].arrive();
    }
  }
}

}  // namespace echo
