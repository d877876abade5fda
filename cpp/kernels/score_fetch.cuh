#pragma once
// The warps of score on Hopper that bring in what is multiplied: one fetches keys, some load queries.

#include <cstdint>

#include "kernels/score_runs.cuh"
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
    const std::int32_t block = run.block(done + lane_index());
    span.token = block * kTokensPerBlock;
    span.is_new = run.is_new(block);
    span.host_block = p.step.block_table[static_cast<std::int64_t>(run.rows.entry) * p.step.table_stride + block];
  }
  return span;
}

/// The fetching warp: has each key block copied into the next stage that is free, and says what to do with it. The
/// block table's entries of a span are loaded while the span before is on its way. `maker` is at the first run.
template <bool kSift>
__device__ void fetch_keys(const CUtensorMap& keys, const ScoreParams& p, RunMaker<kSift>& maker,
                           const ScoreStages& shared, RunList* list, const KernelErrorView& errors) {
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
  bool appended = p.index_key == nullptr;
#pragma unroll 1
  for (bool finished = false; !finished;) {
    if (next && more) {
      more = maker.next();
      if constexpr (kSift) {
        if (more) {
          list->publish(maker.run());
        } else {
          list->close(maker.made());
        }
      }
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
    const unsigned with_new = appended ? 0U : __ballot_sync(kAllLanes, now.is_new);
#pragma unroll 1
    for (std::int32_t i = 0; i < now.count; ++i) {
      const std::int32_t host_block = __shfl_sync(kAllLanes, now.host_block, i);
      const std::int32_t token = __shfl_sync(kAllLanes, now.token, i);
      const bool there = (all_good >> static_cast<unsigned>(i) & 1U) != 0U;
      if (!appended && (with_new >> static_cast<unsigned>(i) & 1U) != 0U) {
        shared.new_keys->wait(0);
        appended = true;
      }
      if (there || kSift) {  // sifters count on every block of a run
        shared.empty[place.stage].wait(place.parity ^ 1U);
        if (ptx::elect()) {
          shared.work[place.stage] = {.group = now.group, .token = there ? token : kSkipped};
          if (there) {
            shared.full[place.stage].arrive_expecting(kMapBlockBytes);
            std::byte* to = shared.keys + place.stage * kStageBytes;
            ptx::copy_box(to, keys, 0, 0, host_block, shared.full[place.stage], policy);
          } else {
            shared.full[place.stage].arrive();
          }
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
      shared.work[place.stage] = {.group = span.group, .token = kNone};
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

/// The first group's queries, by the multiplying warps.
template <int kHeads>
__device__ void load_first_queries(const ScoreParams& p, const GroupRows& rows, const ScoreStages& shared,
                                   const KernelErrorView& errors) {
  load_queries_of<kHeads>(p, rows, 0, warp_index(), kMultiplierWarps, shared, errors, [] {});
  meet(kStart, kMultiplierWarps * kWarp);
}

/// A loading warp's share of the queries of all runs but the first group's. Queries that a buffer still has stay there.
template <int kHeads>
class QueryLoader {
 public:
  /// `rows` of the first group.
  __device__ QueryLoader(const ScoreParams& p, const GroupRows& rows, const ScoreStages& shared,
                         const KernelErrorView& errors)
      : p_(p), shared_(shared), errors_(errors), held_first_(rows.first) {}

  /// Whether load would not have to wait.
  __device__ bool can_load(const Run& run) const {
    return run.queries <= ready_ || run.queries < kBuffers ||
           __all_sync(kAllLanes, shared_.queries_empty[run.queries % kBuffers].completed(parity(run.queries)));
  }
  /// Loads a run's queries if they are missing. Waits until those before it have been left, even where they are the
  /// same: a barrier must not be two phases ahead of anyone.
  __device__ void load(const Run& run) {
    if (run.queries <= ready_) {
      return;
    }
    ready_ = run.queries;
    const int buffer = run.queries % kBuffers;
    const auto wait_for_buffer = [&] {
      if (run.queries >= kBuffers) {
        shared_.queries_empty[buffer].wait(parity(run.queries));
      }
    };
    if ((buffer == 0 ? held_first_ : held_second_) == run.rows.first) {
      wait_for_buffer();
    } else {
      load_queries_of<kHeads>(p_, run.rows, run.queries, warp_index() - kFetcher - 1, kLoaderWarps, shared_, errors_,
                              wait_for_buffer);
      held_first_ = buffer == 0 ? run.rows.first : held_first_;
      held_second_ = buffer == 0 ? held_second_ : run.rows.first;
    }
    __syncwarp();
    if (lane_index() == 0) {
      shared_.queries_full[buffer].arrive();
    }
  }

 private:
  __device__ static std::uint32_t parity(std::int32_t queries) {
    return (static_cast<std::uint32_t>(queries / kBuffers) - 1U) & 1U;
  }

  const ScoreParams& p_;
  const ScoreStages& shared_;
  const KernelErrorView& errors_;
  std::int32_t held_first_;           ///< first row of the group whose queries the first buffer has
  std::int32_t held_second_ = kNone;  ///< and the second
  std::int32_t ready_ = 0;            ///< queries that are there or will be
};

/// The same for a warp that has other things to do besides: reads runs from the list.
template <int kHeads>
class ListLoader {
 public:
  __device__ ListLoader(const ScoreParams& p, const GroupRows& rows, const ScoreStages& shared, RunList& list,
                        const KernelErrorView& errors)
      : loader_(p, rows, shared, errors), list_(list) {}

  /// Looks at the next run, and loads its queries if they are missing and their buffer is free. False if it cannot.
  __device__ bool try_next() {
    if (!list_.has(next_) || !loader_.can_load(list_[next_])) {
      return false;
    }
    loader_.load(list_[next_]);
    ++next_;
    __syncwarp();
    if (lane_index() == 0) {
      store_released(list_.seen[warp_index() - kFetcher - 1], next_);
    }
    return true;
  }
  /// Whether there is nothing left to do.
  __device__ bool finished() const { return list_.ends_at(next_); }

 private:
  QueryLoader<kHeads> loader_;
  RunList& list_;
  std::int32_t next_ = 0;  ///< run to look at
};

}  // namespace echo
