#pragma once
// What long random runs see of their world and draw, on either backend: a piece of work per index, which is a kernel on
// the GPU and a loop on the CPU. A row's bytes follow from its number and how often it has been written; those numbers
// are the model.

#include <cuda/atomic>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cache_manager/address.hpp"
#include "kernels/params.hpp"

namespace echo::residency_test {

__host__ __device__ inline std::uint32_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(value >> 31);
}

/// Word of a row that was written `version` times.
__host__ __device__ inline std::uint32_t row_word(std::int32_t row, std::int32_t version, std::int32_t word) {
  return mixed(
      (static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) << 32 | static_cast<std::uint32_t>(version)) *
          0x9E3779B97F4A7C15ULL +
      static_cast<std::uint32_t>(word));
}

enum class Verb : std::int32_t { begin, append, recall, append_and_recall, release };

/// How selections are drawn.
enum class Taste : std::int32_t { anywhere, recent, few, prefix, gaps, nothing, turnover };
inline constexpr std::int32_t kTastes = 7;

enum class Fault : std::int32_t {
  none,
  stamp_of_slot,
  row_of_slot,
  bytes_of_slot,
  slot_of_row,
  stack,
  entry,
  new_row,
  bytes_of_new_row,
  free_count,
  hits_and_misses,
  misses,
  balance,
  appended,
  copied,
};
inline const char* name_of(Fault fault) {
  constexpr const char* kNames[] = {
      "none",    "stamp_of_slot",    "row_of_slot", "bytes_of_slot",   "slot_of_row", "stack",   "entry",
      "new_row", "bytes_of_new_row", "free_count",  "hits_and_misses", "misses",      "balance", "appended",
      "copied"};
  return kNames[static_cast<std::int32_t>(fault)];
}

/// The first fault, and what a check adds up. In device memory.
struct Findings {
  Fault fault;
  std::int32_t index;
  std::int32_t call;
  std::int32_t faults;
  std::int32_t entries;   ///< of the selection that name a row
  std::int32_t distinct;  ///< rows among them
  std::int32_t free;      ///< slots with the stamp of a free one
  std::int32_t new_rows;
  std::int32_t new_without_slot;  ///< before the pass
  ReplacementState replacement;   ///< after the call before
  LayerCounters counters;
};

/// What the works see of the world; trivially copyable.
struct WorldView {
  LayerView layer;
  StepView step;
  ShapeView shape;
  std::int32_t* selection;
  std::int32_t* slots;
  float* kth_score;
  std::byte* kv;
  std::int32_t* row_versions;  ///< [rows of the pass] what the new rows will be
  std::int32_t* versions;      ///< [host rows]
  std::int32_t* row_marks;     ///< [host rows] the last call that selected it
  std::int32_t* slot_marks;    ///< [slots] the last call that found it on the stack
  Findings* findings;

  __host__ __device__ std::int64_t entries() const { return static_cast<std::int64_t>(step.rows) * shape.top_k; }
  __host__ __device__ std::int32_t words() const { return layer.row_bytes / 4; }
  /// Host row of a position of the row's session.
  __host__ __device__ std::int32_t host_row(std::int32_t row, std::int32_t position) const {
    return echo::host_row(step.block_table + static_cast<std::int64_t>(row / step.query_rows) * step.table_stride,
                          position);
  }
  __host__ __device__ bool has_bytes(const std::byte* bytes, std::int32_t row, std::int32_t first,
                                     std::int32_t step_words) const {
    for (std::int32_t word = first; word < words(); word += step_words) {
      if (reinterpret_cast<const std::uint32_t*>(bytes)[word] != row_word(row, versions[row], word)) {
        return false;
      }
    }
    return true;
  }
};

template <typename T>
__host__ __device__ T add(T& to, T value) {
  return cuda::atomic_ref<T, cuda::thread_scope_device>(to).fetch_add(value, cuda::memory_order_relaxed);
}
__host__ __device__ inline std::int32_t exchange(std::int32_t& word, std::int32_t value) {
  return cuda::atomic_ref<std::int32_t, cuda::thread_scope_device>(word).exchange(value, cuda::memory_order_relaxed);
}

/// Draws what a pass selects and what its new rows are.
struct Draw {
  WorldView world;
  Taste taste;
  std::uint32_t seed;

  __host__ __device__ std::uint32_t random(std::int64_t index) const {
    return mixed((static_cast<std::uint64_t>(seed) << 32) + static_cast<std::uint64_t>(index));
  }
  __host__ __device__ std::int32_t position(std::int64_t entry, std::int32_t own) const {
    const auto count = static_cast<std::uint32_t>(own + 1);
    const auto k = static_cast<std::uint32_t>(world.shape.top_k);
    const std::uint32_t per_session = k * static_cast<std::uint32_t>(world.step.query_rows);
    const std::uint32_t any = random(entry);
    const auto least = [&](std::uint32_t most) { return most < count ? most : count; };
    switch (taste) {
      case Taste::recent:
        return own - static_cast<std::int32_t>(any % least(k / 2));
      case Taste::few:
        return static_cast<std::int32_t>(random(any % (k / 4 + 1) - (1LL << 32)) % count);
      case Taste::prefix:
        return static_cast<std::int32_t>(any % least(kTokensPerBlock));
      case Taste::gaps:
        return any % 3 == 0 ? kNone : own - static_cast<std::int32_t>(any % least(3 * k));
      case Taste::nothing:
        return kNone;
      case Taste::turnover:  // distinct, and others in every pass
        return static_cast<std::int32_t>((seed * per_session + static_cast<std::uint32_t>(entry) % per_session) %
                                         count);
      default:
        return static_cast<std::int32_t>(any % count);
    }
  }
  __host__ __device__ void operator()(std::int64_t index) const {
    if (index < world.entries()) {
      const auto row = static_cast<std::int32_t>(index / world.shape.top_k);
      const std::int32_t own = world.step.positions[row];
      world.selection[index] = own == kNone ? static_cast<std::int32_t>(random(index)) : position(index, own);
    }
    if (index < world.step.rows) {
      const auto row = static_cast<std::int32_t>(index);
      world.kth_score[row] = random(~index) % 4 == 0 ? NAN : static_cast<float>(random(~index) % 100);
      if (const std::int32_t own = world.step.positions[row]; own != kNone) {
        const std::int32_t target = world.host_row(row, own);
        world.versions[target] = world.row_versions[row];
        for (std::int32_t word = 0; word < world.words(); ++word) {
          reinterpret_cast<std::uint32_t*>(row_address(world.kv, row, world.layer.row_bytes))[word] =
              row_word(target, world.row_versions[row], word);
        }
      }
    }
  }
  std::int64_t count() const { return std::max<std::int64_t>(world.entries(), world.step.rows); }
};

}  // namespace echo::residency_test
