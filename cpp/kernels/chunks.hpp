#pragma once

#include <algorithm>
#include <cstddef>

namespace echo {

/// Takes memory chunk by chunk, or not at all: calls `take(begin, bytes)` for one chunk after the other and, if one
/// returns false, `give_back(begin)` for those before it. Returns how many bytes were taken before that; all of them
/// are kept if it is `bytes`, none otherwise.
template <typename Take, typename GiveBack>
std::size_t take_in_chunks(std::byte* begin, std::size_t bytes, std::size_t chunk, Take take, GiveBack give_back) {
  for (std::size_t done = 0; done < bytes; done += chunk) {
    if (!take(begin + done, std::min(chunk, bytes - done))) {
      for (std::size_t undone = 0; undone < done; undone += chunk) {
        give_back(begin + undone);
      }
      return done;
    }
  }
  return bytes;
}

}  // namespace echo
