#pragma once
// The warps of score on Hopper that bring in what is multiplied: one fetches keys, some load queries.

#include <cstdint>

#include "kernels/score_stages.cuh"
#include "kernels/score_walk.cuh"

namespace echo {

/// Up to 32 key blocks of a run; lane i knows the first token of the i-th, and where it lies, kNone if nowhere.
struct Span {
  std::int32_t group;  ///< of the thread block
  std::int32_t count;
  std::int32_t token;
  std::int32_t host_block;
};

__device__ inline Span span_at(const ScoreParams& p, const Run& run, std::int32_t done) {
  Span span{.group = run.group, .count = min(run.count - done, kWarp), .token = 0, .host_block = kNone};
  if (lane_index() < span.count) {
    const std::int32_t block = run.block(done + lane_index());
    span.token = block * kTokensPerBlock;
    span.host_block = p.step.block_table[static_cast<std::int64_t>(run.rows.entry) * p.step.table_stride + block];
  }
  return span;
}

/// The fetching warp: has each key block copied into the next stage that is free, and says what to do with it. The
/// block table's entries of a span are loaded while the span before is on its way.
template <bool kSift>
__device__ void fetch_keys(const CUtensorMap& keys, const ScoreParams& p, const GroupWalk& groups,
                           const ScoreStages& shared, const KernelErrorView& errors) {
  constexpr std::int32_t kAhead = 3;  ///< key blocks of a span that go first, so that memory is soon busy
  // Rows of an entry that are not in this group will need the same keys soon.
  const std::uint64_t policy = cache_policy(p.step.query_rows > shared.sizes.group_rows);
  const std::int64_t host_blocks = p.layer.host_rows / kTokensPerBlock;
  RingPlace place{.stage = 0};
  ShareWalk<kSift> walk(groups);
  Run run = walk.run();
  std::int32_t done = 0;
  // Goes to a run that has blocks left.
  const auto find_more = [&] {
    while (done == run.count) {
      if (!walk.next()) {
        return false;
      }
      run = walk.run();
      done = 0;
    }
    return true;
  };
  bool more = find_more();
  Span span = span_at(p, run, 0);
  while (more) {
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
      const std::int32_t token = __shfl_sync(kAllLanes, now.token, i);
      const bool there = (all_good >> static_cast<unsigned>(i) & 1U) != 0U;
      if (there || kSift) {  // sifters count on every block of the walk
        wait(shared.empty[place.stage], place.parity ^ 1U);
        if (elect_lane()) {
          shared.work[place.stage] = {.group = now.group, .token = there ? token : kSkipped};
          if (there) {
            arrive_expecting(shared.full[place.stage], kMapBlockBytes);
            std::byte* to = shared.keys + place.stage * kStageBytes;
            copy_box(to, keys, 0, 0, host_block, shared.full[place.stage], policy);
          } else {
            arrive(shared.full[place.stage]);
          }
        }
        __syncwarp();
        place.advance(1, shared.stages);
      }
      if (i == min(now.count - 1, kAhead)) {
        done += now.count;
        more = find_more();
        if (more) {
          span = span_at(p, run, done);
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
__device__ void load_queries_of(const ScoreParams& p, const GroupRows& rows, std::int32_t group, int warp, int warps,
                                const ScoreStages& shared, const KernelErrorView& errors, Free free) {
  const GroupQueries to = shared.queries_of(group);
  if (p.index_q_dtype == DType::f32) {
    load_queries<kHeads, 1, float>(p, rows, to, warp, warps, errors, free);
  } else {
    load_queries<kHeads, kHeadsInFlight, std::uint16_t>(p, rows, to, warp, warps, errors, free);
  }
  publish_shared_writes();
}

/// The first group's queries, by the multiplying warps.
template <int kHeads>
__device__ void load_first_queries(const ScoreParams& p, const GroupRows& rows, const ScoreStages& shared,
                                   const KernelErrorView& errors) {
  load_queries_of<kHeads>(p, rows, 0, warp_index(), kMultiplierWarps, shared, errors, [] {});
  join(kStart, kMultiplierWarps * kWarp);
}

/// A loading warp's share of the queries of all further groups: those of the second at once.
template <int kHeads, bool kSift>
class QueryLoader {
 public:
  /// `walk` is at the first group.
  __device__ QueryLoader(const ScoreParams& p, const GroupWalk& walk, const ScoreStages& shared,
                         const KernelErrorView& errors)
      : p_(p), walk_(walk), shared_(shared), errors_(errors), more_(walk_.next()) {
    if (more_) {
      load();
      if (kSift && !more_) {
        publish();  // the third is the first once more
      }
    }
  }

  __device__ bool more() const { return more_; }

  /// Waits until the buffer is free, and fills it.
  __device__ void load() {
    load_queries_of<kHeads>(p_, walk_.rows(), group_, warp_index() - kFetcher - 1, kLoaderWarps, shared_, errors_, [&] {
      if (group_ >= kBuffers) {
        wait(shared_.queries_empty[group_ % kBuffers], parity());
      }
    });
    publish();
    ++group_;
    more_ = walk_.next();
  }
  /// The same if it is free.
  __device__ void try_load() {
    if (more_ && has_left(shared_.queries_empty[group_ % kBuffers], parity())) {
      load();
    }
  }

 private:
  __device__ std::uint32_t parity() const { return (static_cast<std::uint32_t>(group_ / kBuffers) - 1U) & 1U; }
  __device__ void publish() const {
    __syncwarp();
    if (lane_index() == 0) {
      arrive(shared_.queries_full[group_ % kBuffers]);
    }
  }

  const ScoreParams& p_;
  GroupWalk walk_;
  const ScoreStages& shared_;
  const KernelErrorView& errors_;
  std::int32_t group_ = 1;
  bool more_;
};

}  // namespace echo
