#include "kernels/call_checks.hpp"

#include <algorithm>
#include <string>

#include "cache_manager/release.cuh"
#include "echo/errors.hpp"

namespace echo {
namespace {

/// Rows move in pieces of this many bytes.
constexpr std::int64_t kPieceBytes = 16;

}  // namespace

void require_at_most(const char* what, std::int64_t value, std::int64_t most) {
  if (value > most) {
    throw InvalidArgument(std::string(what) + ": " + std::to_string(value) + " given, the backend was prepared for " +
                          std::to_string(most));
  }
}

void require_pieces(const char* what, std::int64_t bytes) {
  if (bytes % kPieceBytes != 0) {
    throw InvalidArgument(std::string(what) + ": " + std::to_string(bytes) + " bytes given, expected a multiple of " +
                          std::to_string(kPieceBytes));
  }
}

std::vector<RowRun> short_runs(std::span<const RowRun> rows, std::int64_t host_rows) {
  std::vector<RowRun> runs;
  for (const RowRun& run : rows) {
    if (run.first < 0 || run.count < 0 || static_cast<std::int64_t>(run.first) + run.count > host_rows) {
      throw InvalidArgument("rows: " + std::to_string(run.first) + " + " + std::to_string(run.count) +
                            " given, the host pool has " + std::to_string(host_rows));
    }
    for (std::int32_t done = 0; done < run.count; done += kReleasedAtOnce) {
      runs.push_back({.first = run.first + done, .count = std::min(kReleasedAtOnce, run.count - done)});
    }
  }
  return runs;
}

}  // namespace echo
