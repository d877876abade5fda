#pragma once
// Sizes of the worlds in which long random runs are made.

#include <cstdint>
#include <ostream>

#include "cache_manager/address.hpp"

namespace echo::residency_test {

struct Sizes {
  const char* name;
  std::int32_t slots;  ///< 0: the fewest that a pass may need, -1: one for each host row
  std::int32_t batch;
  std::int32_t query_rows;
  std::int32_t top_k;
  std::int32_t table_stride;
  std::int32_t shared_blocks;  ///< at the beginning of all sessions
  std::int32_t row_bytes;
  bool tight = false;  ///< every pass wants other rows, as many as there are slots

  std::int32_t rows() const { return batch * query_rows; }
  std::int32_t own_blocks() const { return table_stride - shared_blocks; }
  std::int32_t host_blocks() const { return shared_blocks + batch * own_blocks(); }
  std::int32_t host_rows() const { return host_blocks() * kTokensPerBlock; }
  std::int32_t pool() const { return slots > 0 ? slots : (slots == 0 ? rows() * (top_k + 1) : host_rows()); }
  std::int32_t capacity() const { return table_stride * kTokensPerBlock; }
  std::int32_t prefix() const { return shared_blocks * kTokensPerBlock; }
};
inline void PrintTo(const Sizes& sizes, std::ostream* out) { *out << sizes.name; }

}  // namespace echo::residency_test
