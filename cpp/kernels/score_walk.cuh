#pragma once
// In which order a thread block scores its share. Without sifting, from the first key block to the last. With it, every
// kSampleEvery-th block of the sequence goes first, so that after a fraction of the time the grid has scored an even
// sample of all rows, without waiting for anybody.
//
// A part is what a share has of one group. A share of one part: its sample, then the rest. Of two: both samples, then
// the rest of the second, then that of the first, whose queries are still in their buffer. Of more: part by part, since
// queries would have to be loaded twice; such sessions are short.

#include "kernels/score_groups.cuh"

namespace echo {

enum class RunKind : std::int32_t { all, sample, rest };

/// Key blocks of a group that are scored one after the other.
struct Run {
  RunKind kind;
  std::int32_t group;  ///< of the thread block, counted from 0; a part that is gone back to counts again
  GroupRows rows;
  std::int32_t first;  ///< in the numbering of this kind
  std::int32_t count;

  /// Which block of the group the i-th of the run is.
  __device__ std::int32_t block(std::int32_t i) const {
    const std::int32_t number = first + i;
    return kind == RunKind::all      ? number
           : kind == RunKind::sample ? number * kSampleEvery
                                     : number + number / (kSampleEvery - 1) + 1;
  }
};

/// What a thread block has of a group.
struct Part {
  GroupRows rows;
  std::int32_t block;
  std::int32_t count;

  __device__ Run run(RunKind kind, std::int32_t group) const {
    const auto samples_before = [](std::int32_t end) { return (end + kSampleEvery - 1) / kSampleEvery; };
    const std::int32_t samples = samples_before(block);
    const std::int32_t count_of_samples = samples_before(block + count) - samples;
    switch (kind) {
      case RunKind::sample:
        return {kind, group, rows, samples, count_of_samples};
      case RunKind::rest:
        return {kind, group, rows, block - samples, count - count_of_samples};
      default:
        return {kind, group, rows, block, count};
    }
  }
};

/// Walks through the runs of a share; some may be empty. All lanes of a warp walk together.
template <bool kSift>
class ShareWalk {
 public:
  /// `walk` is at the first part.
  __device__ explicit ShareWalk(const GroupWalk& walk) : walk_(walk), total_(walk.left()) {
    first_ = part();
    if (kSift) {
      parts_ = walk_.next() ? 2 : 1;
      if (parts_ == 2) {
        second_ = part();
        parts_ += walk_.next() ? 1 : 0;
      }
    }
  }

  /// Key blocks of all runs.
  __device__ std::int32_t total() const { return total_; }

  __device__ Run run() const {
    if (!kSift) {
      return part().run(RunKind::all, step_);
    }
    const bool sample = parts_ == 2 ? step_ < 2 : step_ % 2 == 0;
    const std::int32_t group = parts_ == 2 ? step_ - step_ / 2 : step_ / 2;  // two parts: 0, 1, 1, 2
    return own_part().run(sample ? RunKind::sample : RunKind::rest, group);
  }

  /// Goes to the next run; false if there is none.
  __device__ bool next() {
    ++step_;
    if (!kSift) {
      return walk_.next();
    }
    if (parts_ <= 2) {
      return step_ < 2 * parts_;
    }
    return step_ < 6 || step_ % 2 == 1 || walk_.next();
  }

  /// The part that the run belongs to.
  __device__ Part own_part() const {
    if (parts_ == 2) {
      return step_ % 3 == 0 ? first_ : second_;
    }
    return step_ < 2 ? first_ : step_ < 4 ? second_ : part();
  }

 private:
  __device__ Part part() const { return {walk_.rows(), walk_.block(), walk_.count()}; }

  GroupWalk walk_;
  std::int32_t total_;
  std::int32_t step_ = 0;
  std::int32_t parts_ = 1;  ///< 3: or more; the walk is at the third then
  Part first_{};
  Part second_{};
};

}  // namespace echo
