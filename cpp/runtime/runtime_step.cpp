// Prefill, capture and the decode step.

#include <algorithm>
#include <string>

#include "echo/errors.hpp"
#include "runtime/in_use.hpp"
#include "runtime/runtime_impl.hpp"
#include "runtime/verb_range.hpp"

namespace echo {

void RuntimeImpl::DeletePass::operator()(ForwardPass* pass) const { delete pass; }

RuntimeImpl::PassPointer RuntimeImpl::make_pass(std::int32_t batch, std::int32_t query_rows, bool prefill) {
  const StepView step = control_.view(state_->control(), state_->owners(), batch, query_rows);
  return PassPointer(new ForwardPass(std::make_unique<ForwardPass::State>(*backend_, state_, plan_, step, prefill)));
}

void RuntimeImpl::run(ForwardPass& pass, const Forward& forward) {
  pass.state_->begin();
  try {
    forward(pass);
    pass.state_->finish();
  } catch (...) {
    pass.state_->active = false;
    throw;
  }
}

void RuntimeImpl::execute(const std::function<void()>& body, std::span<State* const> sessions,
                          std::int64_t new_tokens) {
  backend_->upload_control(state_->control(), control_.data(), control_.bytes());
  for (State* session : sessions) {
    session->used = true;
    session->importing.reset();
  }
  try {
    body();
  } catch (...) {
    roll_back(sessions, new_tokens);
    throw;
  }
  for (State* session : sessions) {
    session->length += new_tokens;
  }
}

void RuntimeImpl::roll_back(std::span<State* const> sessions, std::int64_t tokens) {
  std::vector<RowRun> rows;
  for (const State* session : sessions) {
    const std::vector<RowRun> own = row_runs(*session, session->length, session->length + tokens);
    rows.insert(rows.end(), own.begin(), own.end());
  }
  try {
    backend_->release(state_->layers(), rows);
    state_->clear_kth_scores();
  } catch (const Error&) {
    // The caller gets the error that came first; a device that cannot do this fails in the next call too.
  }
}

void RuntimeImpl::prefill(const Session& session, std::span<const std::int32_t> tokens, const Forward& forward) {
  const VerbRange range("prefill");
  const InUse in_use(in_use_);
  require_open();
  State& state = running(session);
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (count < 1 || count > plan_.config.prefill_chunk) {
    throw InvalidArgument("tokens: " + std::to_string(count) +
                          " given, expected 1 to prefill_chunk = " + std::to_string(plan_.config.prefill_chunk));
  }
  require_room(state, count);
  const Forward& model = forward ? forward : forward_;
  if (!model) {
    throw StateError("forward: none given, and none captured before");
  }
  const auto rows = static_cast<std::int32_t>(count);
  const PassPointer pass = make_pass(1, rows, /*prefill=*/true);
  control_.begin(take_ticks(pass->blocks().size()), 1, rows);
  control_.set(0, state.index, static_cast<std::int32_t>(state.length), tokens, state.blocks);
  State* const only = &state;
  execute([&] { run(*pass, model); }, {&only, 1}, count);
  prefill_tokens_ += count;
}

void RuntimeImpl::capture(Forward forward, const std::vector<std::int32_t>& batch_sizes, std::int32_t query_rows,
                          const Capturer& capturer) {
  const VerbRange range("capture");
  const InUse in_use(in_use_);
  require_open();
  if (!forward) {
    throw InvalidArgument("forward: none given");
  }
  if (query_rows < 1 || query_rows > plan_.config.query_rows) {
    throw InvalidArgument("query_rows: " + std::to_string(query_rows) +
                          " given, expected 1 to query_rows = " + std::to_string(plan_.config.query_rows));
  }
  if (batch_sizes.empty()) {
    throw InvalidArgument("batch_sizes: none given");
  }
  for (std::int32_t batch : batch_sizes) {
    if (batch < 1 || batch > plan_.config.max_batch) {
      throw InvalidArgument("batch_sizes: " + std::to_string(batch) +
                            " given, expected 1 to max_batch = " + std::to_string(plan_.config.max_batch));
    }
  }
  std::map<std::pair<std::int32_t, std::int32_t>, Captured> captured;
  for (std::int32_t batch : batch_sizes) {
    PassPointer pass = make_pass(batch, query_rows, /*prefill=*/false);
    ForwardPass& target = *pass;
    control_.begin(take_ticks(1), batch, query_rows);
    execute([&] { run(target, forward); }, {}, 0);
    const auto body = [&target, forward] { run(target, forward); };
    std::function<void()> replay = capturer ? capturer(body) : backend_->capture(body);
    captured.insert_or_assign({query_rows, batch}, Captured{std::move(pass), std::move(replay)});
  }
  std::erase_if(captured_, [&](const auto& entry) { return entry.first.first == query_rows; });
  captured_.merge(captured);
  forward_ = std::move(forward);
}

std::string RuntimeImpl::captured_sizes() const {
  std::string text;
  for (const auto& [sizes, captured] : captured_) {
    text += (text.empty() ? "" : ", ") + std::to_string(sizes.second) + " x " + std::to_string(sizes.first);
  }
  return text.empty() ? "none" : text;
}

void RuntimeImpl::check_batch(const Batch& batch) const {
  const std::size_t size = batch.sessions.size();
  if (std::ssize(batch.sessions) > plan_.config.max_batch) {
    throw InvalidArgument("sessions: " + std::to_string(size) +
                          " given, expected at most max_batch = " + std::to_string(plan_.config.max_batch));
  }
  if (batch.query_rows < 1 || batch.query_rows > plan_.config.query_rows) {
    throw InvalidArgument("query_rows: " + std::to_string(batch.query_rows) +
                          " given, expected 1 to query_rows = " + std::to_string(plan_.config.query_rows));
  }
  if (batch.tokens.size() != size * static_cast<std::size_t>(batch.query_rows)) {
    throw InvalidArgument("tokens: " + std::to_string(batch.tokens.size()) + " given, expected " +
                          std::to_string(batch.query_rows) + " for each of " + std::to_string(size) + " sessions");
  }
  for (std::size_t i = 0; i < size; ++i) {
    const State& session = running(batch.sessions[i]);
    require_room(session, batch.query_rows);
    for (std::size_t j = 0; j < i; ++j) {
      if (batch.sessions[j].state_ == batch.sessions[i].state_) {
        throw InvalidArgument("sessions: session " + std::to_string(session.id) + " is in the batch twice");
      }
    }
  }
}

void RuntimeImpl::step(const Batch& batch, const Forward& forward) {
  const VerbRange range("step");
  const InUse in_use(in_use_);
  require_open();
  check_batch(batch);
  const auto size = static_cast<std::int32_t>(batch.sessions.size());
  const auto query_rows = static_cast<std::size_t>(batch.query_rows);

  PassPointer eager;
  std::function<void()> body;
  std::int32_t padded = size;
  if (forward) {
    if (size == 0) {
      throw InvalidArgument("sessions: none given; only a captured forward can run on padding alone");
    }
    eager = make_pass(size, batch.query_rows, /*prefill=*/false);
    body = [&] { run(*eager, forward); };
  } else {
    const auto found = captured_.lower_bound({batch.query_rows, std::max(size, 1)});
    if (found == captured_.end() || found->first.first != batch.query_rows) {
      throw StateError("forward: none given, and none was captured for " + std::to_string(size) + " sessions with " +
                       std::to_string(batch.query_rows) + " query rows; captured are " + captured_sizes());
    }
    padded = found->first.second;
    body = found->second.replay;
  }

  std::vector<State*> sessions;
  control_.begin(take_ticks(1), padded, batch.query_rows);
  for (std::int32_t entry = 0; entry < size; ++entry) {
    State& session = usable(batch.sessions[static_cast<std::size_t>(entry)]);
    const std::span tokens(batch.tokens.data() + static_cast<std::size_t>(entry) * query_rows, query_rows);
    control_.set(entry, session.index, static_cast<std::int32_t>(session.length), tokens, session.blocks);
    sessions.push_back(&session);
  }
  execute(body, sessions, batch.query_rows);
  ++steps_;
}

}  // namespace echo
