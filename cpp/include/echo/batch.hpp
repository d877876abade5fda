#pragma once

#include <cstdint>
#include <vector>

#include "echo/export.hpp"
#include "echo/session.hpp"

namespace echo {

/// What one decode step works on: sessions, each with the same number of new tokens (1 for plain decoding,
/// more for speculative decoding). Checked by Runtime::step.
struct ECHO_API Batch {
  std::vector<Session> sessions;
  std::vector<std::int32_t> tokens;  ///< token ids, [sessions, query_rows], row-major
  std::int32_t query_rows = 1;       ///< new tokens per session

  void add(const Session& session, std::int32_t token);
};

}  // namespace echo
