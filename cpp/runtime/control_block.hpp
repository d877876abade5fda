#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "echo/planner.hpp"
#include "kernels/params.hpp"

namespace echo {

/// Where the parts of a control block lie, in 4-byte words: tick | tokens | positions | sessions | block tables.
/// The offsets depend on the plan alone, so that every pass and every captured graph finds them in one place.
struct ControlLayout {
  explicit ControlLayout(const Plan& plan);
  std::int64_t bytes() const { return words * 4; }

  std::int64_t tick = 0;
  std::int64_t tokens;
  std::int64_t positions;
  std::int64_t session;
  std::int64_t block_table;
  std::int64_t words;
  std::int32_t table_stride;
};

/// What the host tells the device about a pass, in one buffer and so in one copy.
class ControlBlock {
 public:
  explicit ControlBlock(const Plan& plan);

  /// Starts a pass of `batch` entries with `query_rows` rows each, all of them padding so far.
  void begin(std::int32_t tick, std::int32_t batch, std::int32_t query_rows);
  /// Fills one entry: its rows continue the session at `position`.
  void set(std::int32_t entry, std::int32_t session, std::int32_t position, std::span<const std::int32_t> tokens,
           std::span<const std::int32_t> blocks);

  const void* data() const { return words_.data(); }
  /// Bytes that the current pass uses.
  std::size_t bytes() const;
  /// The block as kernels see it, once it is uploaded to `device`; `owners` [host blocks] lies beside it.
  StepView view(const std::int32_t* device, BlockOwner* owners, std::int32_t batch, std::int32_t query_rows) const;

 private:
  ControlLayout layout_;
  std::vector<std::int32_t> words_;
  std::int32_t query_rows_ = 0;
  std::int32_t batch_ = 0;
};

}  // namespace echo
