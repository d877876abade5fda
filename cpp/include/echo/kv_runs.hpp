#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "echo/export.hpp"

namespace echo {

/// Consecutive tokens whose rows lie one after the other in the host pool.
struct KvRun {
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  std::byte* rows = nullptr;  ///< [tokens, row_bytes], rows `stride` bytes apart
  std::int64_t stride = 0;    ///< bytes
};

/// The KV of one session: its rows on the host as views (no copy), its index keys as a copy (they live on the GPU), and
/// what is predicted of its k-th scores. Keeps the host pool's memory alive. What a transfer engine reads from or
/// writes to.
struct ECHO_API KvRuns {
  std::int64_t length = 0;  ///< tokens
  std::int64_t row_bytes = 0;
  std::int64_t index_block_bytes = 0;
  bool writable = false;                           ///< rows may be written to (begin_import), not only read (export_kv)
  std::vector<std::vector<KvRun>> rows;            ///< [layers][runs]
  std::vector<std::vector<std::byte>> index_keys;  ///< [layers][blocks x index_block_bytes]
  std::vector<float> thresholds;                   ///< [layers] predicted k-th scores, not finite where unknown
  std::vector<float> deviations;                   ///< [layers] how far off those are, not finite where unknown
  std::shared_ptr<const void> keep_alive;
};

}  // namespace echo
