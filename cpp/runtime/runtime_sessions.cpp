// Sessions: open, close, fork, truncate, pause; who holds which host rows.
//
// Whatever a session will append lies in blocks that it alone holds; blocks before that may be shared with forks.
// Where a call can fail, all that fails comes first and what others see changes last.

#include <algorithm>
#include <cstring>
#include <string>

#include "echo/errors.hpp"
#include "runtime/in_use.hpp"
#include "runtime/runtime_impl.hpp"

namespace echo {
namespace {
std::string room_for(std::int64_t tokens) { return "max_tokens: a session of " + std::to_string(tokens) + " tokens"; }
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
  state_->clear_prediction(static_cast<std::int32_t>(place));
  BlockPool::Lease blocks = blocks_->allocate(blocks_of(max_tokens), room_for(max_tokens));
  return add_session(place, 0, max_tokens, blocks.take());
}

Session RuntimeImpl::add_session(std::size_t place, std::int64_t length, std::int64_t capacity,
                                 std::vector<std::int32_t> blocks) {
  auto session = std::make_shared<State>();
  session->id = sessions_opened_++;
  session->index = static_cast<std::int32_t>(place);
  session->length = length;
  session->capacity = capacity;
  session->used = length > 0;
  session->blocks = std::move(blocks);
  session->runtime = weak_from_this();
  open_[place] = session;
  return Session(std::move(session));
}

void RuntimeImpl::close_session(State& session) {
  const InUse in_use(in_use_);
  if (session.closed) {
    return;
  }
  blocks_->drop(session.blocks);
  session.closed = true;
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
  BlockPool::Lease own = blocks_->allocate(blocks_of(capacity) - whole, room_for(capacity));
  if (const std::int64_t rest = parent.length % kBlockTokens; rest != 0) {
    copy_block(parent.blocks[static_cast<std::size_t>(whole)], own.blocks().front(), rest);
  }
  state_->write_prediction(static_cast<std::int32_t>(place), state_->read_prediction(parent.index));

  std::vector<std::int32_t> blocks(parent.blocks.begin(), parent.blocks.begin() + whole);
  blocks_->share(blocks);
  const std::vector<std::int32_t> taken = own.take();
  blocks.insert(blocks.end(), taken.begin(), taken.end());
  return add_session(place, parent.length, capacity, std::move(blocks));
}

void RuntimeImpl::truncate(const Session& session, std::int64_t length) {
  const InUse in_use(in_use_);
  require_open();
  State& state = usable(session);
  if (length < 0 || length > state.length) {
    throw InvalidArgument("length: " + std::to_string(length) + " given, expected 0 to the session's " +
                          std::to_string(state.length));
  }
  // What will be appended to must be the session's alone; a block that forks share, or that exports of theirs still
  // show, is replaced, not written to.
  const auto first = static_cast<std::size_t>(length / kBlockTokens);
  std::vector<std::size_t> shared;
  for (std::size_t i = first; i < state.blocks.size(); ++i) {
    if (blocks_->shown_to_others(state.blocks[i], state.id)) {
      shared.push_back(i);
    }
  }
  BlockPool::Lease fresh = blocks_->allocate(
      std::ssize(shared), "length: what a fork shares is replaced by blocks of the session's own; that");
  if (const std::int64_t rest = length % kBlockTokens; rest != 0 && !shared.empty() && shared.front() == first) {
    copy_block(state.blocks[first], fresh.blocks().front(), rest);
  }
  backend_->release(state_->layers(), row_runs(state, length, state.length, Rows::own));
  std::vector<std::int32_t> replaced = fresh.take();
  for (std::size_t i = 0; i < shared.size(); ++i) {
    std::swap(replaced[i], state.blocks[shared[i]]);
  }
  state.length = length;
  blocks_->drop(replaced);
}

void RuntimeImpl::pause(const Session& session) {
  const InUse in_use(in_use_);
  require_open();
  State& state = usable(session);
  if (!state.paused) {
    backend_->release(state_->layers(), row_runs(state, 0, state.length, Rows::own));
    state.paused = true;
  }
}

void RuntimeImpl::resume(const Session& session) {
  const InUse in_use(in_use_);
  require_open();
  usable(session).paused = false;
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

void RuntimeImpl::copy_block(std::int32_t from, std::int32_t to, std::int64_t tokens) {
  backend_->wait();  // the rows may still be on their way to the host
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
    if (which == Rows::own && blocks_->shared(row / kTokensPerBlock)) {
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
