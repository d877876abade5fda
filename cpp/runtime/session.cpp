#include "echo/session.hpp"

#include "echo/errors.hpp"
#include "runtime/runtime_impl.hpp"
#include "runtime/session_state.hpp"

namespace echo {
namespace {
const detail::SessionState& state_of(const std::shared_ptr<detail::SessionState>& state) {
  if (state == nullptr) {
    throw StateError("session: this handle names no session; Runtime::open_session makes them");
  }
  return *state;
}
}  // namespace

std::int64_t Session::id() const { return state_of(state_).id; }
std::int64_t Session::length() const { return state_of(state_).length; }
std::int64_t Session::capacity() const { return state_of(state_).capacity; }
bool Session::closed() const { return state_of(state_).closed || state_->runtime.expired(); }
const std::vector<std::int32_t>& Session::blocks() const { return state_of(state_).blocks; }

bool Session::paused() const { return state_of(state_).paused; }

std::shared_ptr<RuntimeImpl> Session::runtime() const {
  std::shared_ptr<RuntimeImpl> runtime = state_of(state_).runtime.lock();
  if (runtime == nullptr || state_->closed) {
    throw StateError("session: session " + std::to_string(state_->id) + " is closed");
  }
  return runtime;
}

Session Session::fork(std::int64_t max_tokens) const { return runtime()->fork(*this, max_tokens); }
void Session::truncate(std::int64_t length) { runtime()->truncate(*this, length); }
void Session::pause() { runtime()->pause(*this); }
void Session::resume() { runtime()->resume(*this); }

void Session::close() {
  if (state_of(state_).closed) {
    return;
  }
  if (const std::shared_ptr<RuntimeImpl> runtime = state_->runtime.lock()) {
    runtime->close_session(*state_);
  }
}

}  // namespace echo
