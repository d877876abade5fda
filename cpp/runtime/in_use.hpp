#pragma once

#include <atomic>

#include "echo/errors.hpp"
#include "runtime/runtime_impl.hpp"

namespace echo {

/// Holds a runtime for one call. Calls that overlap, from another thread or from within a forward, are mistakes of
/// the caller; they are refused instead of queued, since a queue inside a forward would never move.
class RuntimeImpl::InUse {
 public:
  explicit InUse(std::atomic<bool>& flag) : flag_(flag) {
    if (flag_.exchange(true)) {
      throw StateError("runtime: another call is still running; calls must not overlap");
    }
  }
  ~InUse() { flag_ = false; }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  std::atomic<bool>& flag_;
};

}  // namespace echo
