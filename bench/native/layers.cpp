#include "layers.hpp"

#include <numeric>

namespace echo::bench {

Layers::Layers(Backend& backend, const LayerSizes& sizes, std::byte* slabs) : backend_(backend), sizes_(sizes) {
  constexpr int kUnset = 0xFF;  // -1: no slot, no row, free
  const auto allocate = [&](std::int64_t bytes, const char* name, int byte) {
    Buffer buffer(backend.device_memory(), static_cast<std::size_t>(bytes), name);
    backend.fill(buffer.data(), byte, buffer.bytes());
    return buffer;
  };
  const auto layers = static_cast<std::size_t>(sizes.layers);
  const std::int64_t index_bytes = sizes.host_rows / kTokensPerBlock * sizes.index_block_bytes;
  replacement_ = allocate(static_cast<std::int64_t>(layers * sizeof(ReplacementState)), "replacement", 0);
  counters_ = allocate(static_cast<std::int64_t>(layers * sizeof(LayerCounters)), "counters", 0);
  device_views_ = allocate(static_cast<std::int64_t>(layers * sizeof(LayerView)), "layers", 0);

  std::vector<std::int32_t> stack(static_cast<std::size_t>(sizes.slots));
  std::iota(stack.rbegin(), stack.rend(), 0);
  const std::vector<ReplacementState> all_free(layers, {.hand = 0, .free = sizes.slots});
  backend.copy_to_device(replacement_.data(), all_free.data(), replacement_.bytes());
  for (std::int32_t layer = 0; layer < sizes.layers; ++layer) {
    buffers_.push_back(
        {.pool = allocate(static_cast<std::int64_t>(sizes.slots) * sizes.row_bytes, "pool", kUnset),
         .slot_of = allocate(sizes.host_rows * 4, "slot_of", kUnset),
         .host_of = allocate(sizes.slots * std::int64_t{4}, "host_of", kUnset),
         .stamp = allocate(sizes.slots * std::int64_t{4}, "stamp", kUnset),
         .free_slots = allocate(sizes.slots * std::int64_t{4}, "free_slots", 0),
         .index_keys = Buffer(backend.device_memory(), static_cast<std::size_t>(index_bytes), "index keys")});
    const LayerBuffers& own = buffers_.back();
    backend.copy_to_device(own.free_slots.data(), stack.data(), own.free_slots.bytes());
    views_.push_back({.pool = own.pool.data(),
                      .slab = slabs + layer * sizes.host_rows * sizes.row_bytes,
                      .slot_of = own.slot_of.data<std::int32_t>(),
                      .host_of = own.host_of.data<std::int32_t>(),
                      .stamp = own.stamp.data<std::int32_t>(),
                      .free_slots = own.free_slots.data<std::int32_t>(),
                      .index_keys = own.index_keys.data(),
                      .replacement = replacement_.data<ReplacementState>() + layer,
                      .counters = counters_.data<LayerCounters>() + layer,
                      .slots = sizes.slots,
                      .row_bytes = sizes.row_bytes,
                      .host_rows = sizes.host_rows,
                      .host_stride = sizes.row_bytes,
                      .index_block_bytes = sizes.index_block_bytes});
  }
  backend.copy_to_device(device_views_.data(), views_.data(), device_views_.bytes());
}

std::vector<LayerCounters> Layers::counters() const {
  std::vector<LayerCounters> counters(static_cast<std::size_t>(sizes_.layers));
  backend_.copy_to_host(counters.data(), counters_.data(), counters_.bytes());
  return counters;
}

std::int64_t Layers::free_slots() const {
  std::vector<ReplacementState> states(static_cast<std::size_t>(sizes_.layers));
  backend_.copy_to_host(states.data(), replacement_.data(), replacement_.bytes());
  std::int64_t sum = 0;
  for (const ReplacementState& state : states) {
    sum += state.free;
  }
  return sum;
}

}  // namespace echo::bench
