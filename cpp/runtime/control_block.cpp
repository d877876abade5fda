#include "runtime/control_block.hpp"

#include <algorithm>

namespace echo {
namespace {
/// Parts begin at multiples of 16 bytes.
std::int64_t aligned(std::int64_t words) { return (words + 3) / 4 * 4; }
}  // namespace

ControlLayout::ControlLayout(const Plan& plan)
    : tokens(4),
      positions(tokens + aligned(plan.pass_rows)),
      session(positions + aligned(plan.pass_rows)),
      block_table(session + aligned(plan.pass_rows)),
      table_stride(static_cast<std::int32_t>(blocks_of(plan.config.max_context))) {
  words = block_table + plan.config.max_batch * table_stride;
}

ControlBlock::ControlBlock(const Plan& plan) : layout_(plan), words_(static_cast<std::size_t>(layout_.words)) {}

void ControlBlock::begin(std::int32_t tick, std::int32_t batch, std::int32_t query_rows) {
  batch_ = batch;
  query_rows_ = query_rows;
  const auto rows = static_cast<std::ptrdiff_t>(batch) * query_rows;
  words_[static_cast<std::size_t>(layout_.tick)] = tick;
  std::fill_n(words_.begin() + layout_.tokens, rows, 0);
  std::fill_n(words_.begin() + layout_.positions, rows, kNone);
  std::fill_n(words_.begin() + layout_.session, rows, kNone);
}

void ControlBlock::set(std::int32_t entry, std::int32_t session, std::int32_t position,
                       std::span<const std::int32_t> tokens, std::span<const std::int32_t> blocks) {
  const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(entry) * query_rows_;
  const auto count = static_cast<std::ptrdiff_t>(tokens.size());
  std::copy(tokens.begin(), tokens.end(), words_.begin() + layout_.tokens + row);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    words_[static_cast<std::size_t>(layout_.positions + row + i)] = position + static_cast<std::int32_t>(i);
  }
  std::fill_n(words_.begin() + layout_.session + row, count, session);
  std::copy(blocks.begin(), blocks.end(),
            words_.begin() + layout_.block_table + static_cast<std::ptrdiff_t>(entry) * layout_.table_stride);
}

std::size_t ControlBlock::bytes() const {
  return static_cast<std::size_t>(layout_.block_table + static_cast<std::int64_t>(batch_) * layout_.table_stride) *
         sizeof(std::int32_t);
}

StepView ControlBlock::view(const std::int32_t* device, BlockOwner* owners, std::int32_t batch,
                            std::int32_t query_rows) const {
  return StepView{.tick = device + layout_.tick,
                  .tokens = device + layout_.tokens,
                  .positions = device + layout_.positions,
                  .session = device + layout_.session,
                  .block_table = device + layout_.block_table,
                  .rows = batch * query_rows,
                  .query_rows = query_rows,
                  .table_stride = layout_.table_stride,
                  .owners = owners};
}

}  // namespace echo
