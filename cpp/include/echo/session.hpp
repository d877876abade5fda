#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "echo/export.hpp"

namespace echo {

class RuntimeImpl;

namespace detail {
struct SessionState;
}

/// One request's context: its tokens' rows on the host, their index keys, and what is remembered for
/// prediction. A handle; copies name the same session. Made by Runtime::open_session.
class ECHO_API Session {
 public:
  Session() = default;

  /// Unique over the life of the runtime.
  std::int64_t id() const;
  /// Tokens in the context so far.
  std::int64_t length() const;
  /// Most tokens it can hold: prompt and output.
  std::int64_t capacity() const;
  bool closed() const;
  /// Token position -> host row is blocks()[p / 64] * 64 + p % 64.
  const std::vector<std::int32_t>& blocks() const;
  bool paused() const;

  /// A new session with the same context and its own future, for `max_tokens` tokens (0: the same capacity).
  /// Whole blocks of 64 tokens are shared, the last one is copied. Throws CapacityError.
  Session fork(std::int64_t max_tokens = 0) const;
  /// Forgets all tokens from `length` on (rejected speculation, an edited prompt). What a fork, or an export of one,
  /// shares from there on is replaced by blocks of the session's own: throws CapacityError, and changes nothing, if
  /// there are not enough.
  void truncate(std::int64_t length);
  /// Gives up the session's GPU rows; it keeps its host rows and can be exported, but not decoded, until resumed.
  void pause();
  void resume();
  /// Gives back all host rows and GPU slots. Idempotent, also with steps in flight.
  void close();

  /// Whether both name the same session.
  bool operator==(const Session& other) const { return state_ == other.state_; }

 private:
  friend class Runtime;
  friend class RuntimeImpl;
  explicit Session(std::shared_ptr<detail::SessionState> state) : state_(std::move(state)) {}
  /// The runtime of an open session, which a call has to hold: another thread may let go of it meanwhile.
  std::shared_ptr<RuntimeImpl> runtime() const;
  std::shared_ptr<detail::SessionState> state_;
};

}  // namespace echo
