#include "control.hpp"

#include <algorithm>

#include "echo/model_shape.hpp"

namespace echo::bench {

Control::Control(Backend& backend, const std::vector<std::int32_t>& tokens_of_sessions) : backend_(backend) {
  first_block_.push_back(0);
  for (const std::int32_t tokens : tokens_of_sessions) {
    table_stride_ = std::max(table_stride_, static_cast<std::int32_t>(blocks_of(tokens)));
    first_block_.push_back(first_block_.back() + blocks_of(tokens));
  }
  std::int64_t end = 4;  // the tick, and nothing
  const auto take = [&](std::int64_t count) {
    const std::int64_t first = end;
    end += count;
    return first;
  };
  positions_ = take(sessions());
  session_ = take(sessions());
  hits_ = take(sessions());
  misses_ = take(sessions());
  before_ = take(sessions());
  tables_ = take(static_cast<std::int64_t>(sessions()) * table_stride_);
  words_.assign(static_cast<std::size_t>(end), kNone);
  words_[0] = 0;
  for (std::int32_t i = 0; i < sessions(); ++i) {
    const auto session = static_cast<std::size_t>(i);
    std::int32_t* table = words_.data() + tables_ + static_cast<std::int64_t>(i) * table_stride_;
    for (std::int64_t block = first_block_[session]; block < first_block_[session + 1]; ++block) {
      *table++ = static_cast<std::int32_t>(block);
    }
  }
  device_ = Buffer(backend.device_memory(), words_.size() * sizeof(std::int32_t), "control block");
  owners_ = Buffer(backend.device_memory(), static_cast<std::size_t>(first_block_.back()) * sizeof(BlockOwner),
                   "block owners");
  backend.fill(owners_.data(), 0xFF, owners_.bytes());
}

RowRun Control::rows_of(std::int32_t session) const {
  const auto i = static_cast<std::size_t>(session);
  return {.first = static_cast<std::int32_t>(first_block_[i]) * kTokensPerBlock,
          .count = static_cast<std::int32_t>(first_block_[i + 1] - first_block_[i]) * kTokensPerBlock};
}

void Control::upload(const std::vector<Entry>& entries) {
  words_[0] += 2;  // new rows have the tick between
  std::int32_t before = 0;
  for (std::int32_t i = 0; i < sessions(); ++i) {
    const Entry entry = i < std::ssize(entries) ? entries[static_cast<std::size_t>(i)] : Entry{};
    const auto word = [&](std::int64_t first) -> std::int32_t& { return words_[static_cast<std::size_t>(first + i)]; };
    word(positions_) = entry.position;
    word(session_) = entry.position == kNone ? kNone : i;
    word(hits_) = entry.hits;
    word(misses_) = entry.misses;
    word(before_) = before;
    before += entry.misses;
  }
  backend_.upload_control(device_.data(), words_.data(), device_.bytes());
}

StepView Control::step(std::int32_t rows) const {
  const std::int32_t* words = words_on_device();
  return {.tick = words,
          .tokens = words + positions_,
          .positions = words + positions_,
          .session = words + session_,
          .block_table = words + tables_,
          .rows = rows,
          .query_rows = 1,
          .table_stride = table_stride_,
          .owners = owners_.data<BlockOwner>()};
}

}  // namespace echo::bench
