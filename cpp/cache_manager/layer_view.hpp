#pragma once
// The residency state of one layer as kernels and loops see it: trivially copyable, owns nothing.

#include <cstddef>
#include <cstdint>

#include "cache_manager/replacement.hpp"

namespace echo {

/// Event counts of one layer since construction; written by the backend.
struct LayerCounters {
  std::int64_t hits;
  std::int64_t misses;
  std::int64_t evictions;
  std::int64_t appended;
  std::int64_t lost_races;         ///< hits whose row was just being fetched for another entry
  std::int64_t candidates;         ///< tokens that score listed for select
  std::int64_t full_selects;       ///< rows whose candidates did not do: all scores were searched
  std::int64_t prefetched;         ///< rows fetched by score
  std::int64_t prefetched_used;    ///< and selected in the same call: hits
  std::int64_t prefetches_capped;  ///< rows that score would have fetched but for the cap or a full queue
  std::int64_t forecast;           ///< rows fetched for the next step
  std::int64_t forecast_used;      ///< of them: selected before they were evicted, in whatever step
};

struct LayerView {
  std::byte* pool;           ///< [slots, row_bytes] rows on the GPU
  std::byte* slab;           ///< [host_rows, host_stride] this layer's part of the host pool, device alias
  std::int32_t* slot_of;     ///< [host_rows] host row -> slot; negative: not resident
  std::int32_t* host_of;     ///< [slots] slot -> host row or kNone
  std::int32_t* stamp;       ///< [slots] tick of last use, kFree if free, below it if fetched ahead and not used
  std::int32_t* free_slots;  ///< [slots] a stack: the first `replacement->free` entries are the free slots
  std::byte* index_keys;     ///< [host_rows / 64, index_block_bytes]
  ReplacementState* replacement;
  LayerCounters* counters;
  std::int32_t slots;
  std::int32_t row_bytes;
  std::int64_t host_rows;
  std::int64_t host_stride;  ///< bytes between host rows, >= row_bytes
  std::int64_t index_block_bytes;
};

}  // namespace echo
