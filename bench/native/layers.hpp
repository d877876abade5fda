#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/backend.hpp"

namespace echo::bench {

/// Pools and maps of all layers, empty, allocated as a runtime does it.
class Layers {
 public:
  /// `slabs`: device alias of kLayers slabs of host rows without gaps.
  Layers(Backend& backend, std::int32_t slots, std::int32_t row_bytes, std::int64_t host_rows, std::byte* slabs);

  std::span<const LayerView> views() const { return views_; }
  const LayerView* device_views() const { return device_views_.data<LayerView>(); }

  std::vector<LayerCounters> counters() const;
  /// Free slots of each layer; StateError if the layers differ.
  std::int32_t free_slots() const;

 private:
  struct LayerBuffers {
    Buffer pool;
    Buffer slot_of;
    Buffer host_of;
    Buffer stamp;
    Buffer free_slots;
  };

  Backend& backend_;
  Buffer replacement_;
  Buffer counters_;
  Buffer device_views_;
  std::vector<LayerBuffers> buffers_;
  std::vector<LayerView> views_;
};

}  // namespace echo::bench
