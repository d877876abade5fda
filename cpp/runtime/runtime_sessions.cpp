// Sessions: open, close, fork, truncate, pause; who holds which host rows.
//
// Whatever a session will append lies in blocks that it alone holds; blocks before that may be shared with forks.

#include <algorithm>
#include <cstring>
#include <string>

#include "echo/errors.hpp"
#include "runtime/in_use.hpp"
#include "runtime/runtime_impl.hpp"

namespace echo {
namespace {
std::int64_t blocks_for(std::int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }
}  // namespace

RuntimeImpl::State& RuntimeImpl::usable(const Session& session) const {
  if (session.state_ == nullptr || session.state_->runtime.lock().get() != this) {
    throw InvalidArgument("session: it was not opened by this runtime");
  }
  if (session.state_->closed) {
    throw StateError("session: session " + std::to_string(session.state_->id) + " is closed");
  }
  return *session.state_;
}

RuntimeImpl::State& RuntimeImpl::running(const Session& session) const {
  State& state = usable(session);
  if (state.paused) {
    throw StateError("session: session " + std::to_string(state.id) + " is paused; resume it first");
  }
  return state;
}

void RuntimeImpl::require_room(const State& session, std::int64_t tokens) const {
  if (session.length + tokens > session.capacity) {
    throw CapacityError("tokens: session " + std::to_string(session.id) + " holds " + std::to_string(session.length) +
                        " of " + std::to_string(session.capacity) + " tokens, no room for " + std::to_string(tokens) +
                        " more");
  }
}

Session RuntimeImpl::open_session(std::int64_t max_tokens) {
  const InUse in_use(in_use_);
  require_open();
  const std::size_t place = free_place(max_tokens);
  std::vector<std::int32_t> blocks = allocate_blocks(blocks_for(max_tokens), max_tokens);
  State& state = *(open_[place] = std::make_shared<State>());
  state.id = sessions_opened_++;
  state.index = static_cast<std::int32_t>(place);
  state.capacity = max_tokens;
  state.blocks = std::move(blocks);
  state.runtime = weak_from_this();
  state_->clear_thresholds(state.index);
  return Session(open_[place]);
}

void RuntimeImpl::close_session(State& session) {
  const InUse in_use(in_use_);
  if (session.closed) {
    return;
  }
  backend_->release(state_->layers(), row_runs(session, 0, session.length, Rows::own));
  session.closed = true;
  put_aside(session.blocks);
  open_[static_cast<std::size_t>(session.index)] = nullptr;
}

Session RuntimeImpl::fork(const Session& session, std::int64_t max_tokens) {
  const InUse in_use(in_use_);
  require_open();
  const State& parent = usable(session);
  const std::int64_t capacity = max_tokens == 0 ? parent.capacity : max_tokens;
  if (capacity < parent.length) {
    throw InvalidArgument("max_tokens: " + std::to_string(max_tokens) + " given, but the session holds " +
                          std::to_string(parent.length) + " tokens");
  }
  const std::size_t place = free_place(capacity);
  const std::int64_t whole = parent.length / kBlockTokens;
  std::vector<std::int32_t> own = allocate_blocks(blocks_for(capacity) - whole, capacity);

  State& child = *(open_[place] = std::make_shared<State>());
  child.id = sessions_opened_++;
  child.index = static_cast<std::int32_t>(place);
  child.length = parent.length;
  child.capacity = capacity;
  child.blocks.assign(parent.blocks.begin(), parent.blocks.begin() + whole);
  child.runtime = weak_from_this();
  blocks_.share(child.blocks);
  child.blocks.insert(child.blocks.end(), own.begin(), own.end());
  if (const std::int64_t rest = parent.length % kBlockTokens; rest != 0) {
    copy_block(parent.blocks[static_cast<std::size_t>(whole)], own.front(), rest);
  }
  const std::vector<float> thresholds = state_->read_thresholds(parent.index);
  state_->write_thresholds(child.index, thresholds);
  return Session(open_[place]);
}

void RuntimeImpl::truncate(State& session, std::int64_t length) {
  const InUse in_use(in_use_);
  require_open();
  if (length < 0 || length > session.length) {
    throw InvalidArgument("length: " + std::to_string(length) + " given, expected 0 to the session's " +
                          std::to_string(session.length));
  }
  // What will be appended to must be the session's own; a shared block is replaced, not written to.
  const auto first = static_cast<std::size_t>(length / kBlockTokens);
  std::vector<std::size_t> shared;
  for (std::size_t i = first; i < session.blocks.size(); ++i) {
    if (blocks_.shared(session.blocks[i])) {
      shared.push_back(i);
    }
  }
  const std::vector<std::int32_t> fresh = allocate_blocks(std::ssize(shared), session.capacity);
  backend_->release(state_->layers(), row_runs(session, length, session.length, Rows::own));
  std::vector<std::int32_t> replaced;
  for (std::size_t i = 0; i < shared.size(); ++i) {
    std::int32_t& block = session.blocks[shared[i]];
    if (shared[i] == first && length % kBlockTokens != 0) {
      copy_block(block, fresh[i], length % kBlockTokens);
    }
    replaced.push_back(block);
    block = fresh[i];
  }
  put_aside(replaced);
  session.length = length;
}

void RuntimeImpl::pause(State& session) {
  const InUse in_use(in_use_);
  require_open();
  if (!session.paused) {
    backend_->release(state_->layers(), row_runs(session, 0, session.length, Rows::own));
    session.paused = true;
  }
}

void RuntimeImpl::resume(State& session) {
  const InUse in_use(in_use_);
  require_open();
  session.paused = false;
}

std::size_t RuntimeImpl::free_place(std::int64_t max_tokens) const {
  if (max_tokens < 1 || max_tokens > plan_.config.max_context) {
    throw InvalidArgument("max_tokens: " + std::to_string(max_tokens) +
                          " given, expected 1 to max_context = " + std::to_string(plan_.config.max_context));
  }
  const auto place = std::find(open_.begin(), open_.end(), nullptr);
  if (place == open_.end()) {
    throw CapacityError("max_sessions: all " + std::to_string(open_.size()) + " sessions are open");
  }
  return static_cast<std::size_t>(place - open_.begin());
}

std::vector<std::int32_t> RuntimeImpl::allocate_blocks(std::int64_t count, std::int64_t max_tokens) {
  reuse_finished();
  if (count > blocks_.free_blocks() && !put_aside_.empty()) {
    backend_->synchronize();
    reuse_finished();
  }
  std::optional<std::vector<std::int32_t>> blocks = blocks_.allocate(static_cast<std::int32_t>(count));
  if (!blocks) {
    throw CapacityError("max_tokens: a session of " + std::to_string(max_tokens) + " tokens needs " +
                        std::to_string(count) + " blocks of 64 host rows, " + std::to_string(free_blocks()) + " of " +
                        std::to_string(plan_.host_blocks) + " are free");
  }
  return std::move(*blocks);
}

void RuntimeImpl::put_aside(const std::vector<std::int32_t>& blocks) {
  put_aside_.push_back({.mark = backend_->mark(), .blocks = blocks_.drop(blocks)});
  reuse_finished();
}

void RuntimeImpl::reuse_finished() {
  while (!put_aside_.empty() && backend_->done(put_aside_.front().mark)) {
    blocks_.recycle(put_aside_.front().blocks);
    put_aside_.pop_front();
  }
}

std::int64_t RuntimeImpl::free_blocks() const {
  std::int64_t count = blocks_.free_blocks();
  for (const PutAside& waiting : put_aside_) {
    count += std::ssize(waiting.blocks);
  }
  return count;
}

void RuntimeImpl::copy_block(std::int32_t from, std::int32_t to, std::int64_t tokens) {
  backend_->synchronize();  // the rows may still be on their way to the host
  const auto bytes = static_cast<std::size_t>(tokens * plan_.host_row_stride);
  std::vector<std::byte> keys(static_cast<std::size_t>(plan_.shape.index_block_bytes()));
  for (std::int32_t layer = 0; layer < plan_.shape.layers; ++layer) {
    const LayerView& view = state_->layer(layer);
    std::memcpy(pool_->row(layer, static_cast<std::int64_t>(to) * kBlockTokens),
                pool_->row(layer, static_cast<std::int64_t>(from) * kBlockTokens), bytes);
    backend_->copy_to_host(keys.data(), row_address(view.index_keys, from, view.index_block_bytes), keys.size());
    backend_->copy_to_device(row_address(view.index_keys, to, view.index_block_bytes), keys.data(), keys.size());
  }
}

std::vector<RowRun> RuntimeImpl::row_runs(const State& session, std::int64_t begin, std::int64_t end,
                                          Rows which) const {
  std::vector<RowRun> runs;
  for (std::int64_t position = begin; position < end;) {
    const std::int64_t in_block = std::min(end - position, kBlockTokens - position % kBlockTokens);
    const std::int32_t row = host_row(session.blocks.data(), static_cast<std::int32_t>(position));
    position += in_block;
    if (which == Rows::own && blocks_.shared(row / kTokensPerBlock)) {
      continue;
    }
    if (!runs.empty() && runs.back().first + runs.back().count == row) {
      runs.back().count += static_cast<std::int32_t>(in_block);
    } else {
      runs.push_back({.first = row, .count = static_cast<std::int32_t>(in_block)});
    }
  }
  return runs;
}

}  // namespace echo
