#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/backend.hpp"

namespace echo::bench {

struct LayerSizes {
  std::int32_t layers;
  std::int32_t slots;  ///< of a layer
  std::int32_t row_bytes;
  std::int64_t host_rows;
  std::int64_t index_block_bytes;  ///< 0: no index keys
};

/// Pools and maps of all layers, empty, allocated as a runtime does it; index keys are what memory held before.
class Layers {
 public:
  /// `slabs`: device alias of the layers' slabs of host rows, without gaps.
  Layers(Backend& backend, const LayerSizes& sizes, std::byte* slabs);

  std::span<const LayerView> views() const { return views_; }
  const LayerView* device_views() const { return device_views_.data<LayerView>(); }

  std::vector<LayerCounters> counters() const;
  /// Of all layers together. Each may have others: of a session that is released some rows may have been evicted.
  std::int64_t free_slots() const;

 private:
  struct LayerBuffers {
    Buffer pool;
    Buffer slot_of;
    Buffer host_of;
    Buffer stamp;
    Buffer free_slots;
    Buffer index_keys;
  };

  Backend& backend_;
  LayerSizes sizes_;
  Buffer replacement_;
  Buffer counters_;
  Buffer device_views_;
  std::vector<LayerBuffers> buffers_;
  std::vector<LayerView> views_;
};

}  // namespace echo::bench
