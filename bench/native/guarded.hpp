#pragma once

#include <exception>
#include <string>

namespace echo::bench {

/// What went wrong in the last call of this thread.
inline std::string& error_text() {
  static thread_local std::string text;
  return text;
}

/// Runs the body of a C function: 0, or -1 and the error's text.
template <typename Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    error_text() = error.what();
    return -1;
  }
}

}  // namespace echo::bench
