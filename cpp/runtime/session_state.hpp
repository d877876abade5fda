#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace echo {

class RuntimeImpl;

namespace detail {

/// What a Session handle points to. Only the runtime changes it.
struct SessionState {
  std::int64_t id = 0;
  std::int32_t index = 0;  ///< row of per-session state on the device
  std::int64_t length = 0;
  std::int64_t capacity = 0;
  std::atomic<bool> closed = false;  ///< handles look at it without the runtime's lock
  bool paused = false;
  bool used = false;                    ///< the device may have work in flight on its host rows
  std::weak_ptr<const void> importing;  ///< of what begin_import gave last, until anything else writes to the rows
  std::vector<std::int32_t> blocks;
  std::weak_ptr<RuntimeImpl> runtime;
};

}  // namespace detail
}  // namespace echo
