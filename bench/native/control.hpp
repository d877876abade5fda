#pragma once

#include <cstdint>
#include <vector>

#include "bench_case.hpp"
#include "runtime/backend.hpp"

namespace echo::bench {

/// What a replay is to select, per entry.
struct Entry {
  std::int32_t position = kNone;  ///< of its row; kNone: padding
  std::int32_t hits = 0;
  std::int32_t misses = 0;
};

/// The control block of a step, and behind it what the draw needs to know. Session i is batch entry i; its host rows
/// follow each other, and those of session i - 1.
class Control {
 public:
  Control(Backend& backend, const std::vector<std::int32_t>& tokens_of_sessions);

  std::int64_t host_rows() const { return first_block_.back() * std::int64_t{kTokensPerBlock}; }
  std::int32_t sessions() const { return static_cast<std::int32_t>(first_block_.size()) - 1; }
  /// Its host rows, all blocks full.
  RowRun rows_of(std::int32_t session) const;
  std::int64_t score_stride() const { return static_cast<std::int64_t>(table_stride_) * kTokensPerBlock; }

  /// Starts a pass with the next tick. Entries that are not given are padding.
  void upload(const std::vector<Entry>& entries);
  /// As if there had been passes before the next one.
  void let_pass(std::int32_t ticks) { words_[0] += ticks; }

  /// The first `rows` entries.
  StepView step(std::int32_t rows) const;
  const std::int32_t* hits_of() const { return words_on_device() + hits_; }
  const std::int32_t* misses_of() const { return words_on_device() + misses_; }
  const std::int32_t* missing_before() const { return words_on_device() + before_; }

 private:
  const std::int32_t* words_on_device() const { return device_.data<std::int32_t>(); }

  Backend& backend_;
  std::vector<std::int64_t> first_block_;  ///< of each session; at the end how many there are
  std::int32_t table_stride_ = 0;
  std::int64_t positions_;
  std::int64_t session_;
  std::int64_t hits_;
  std::int64_t misses_;
  std::int64_t before_;
  std::int64_t tables_;
  std::vector<std::int32_t> words_;
  Buffer device_;
  Buffer owners_;
};

}  // namespace echo::bench
