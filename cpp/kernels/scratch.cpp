#include "kernels/scratch.hpp"

#include <algorithm>

namespace echo {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(std::max<std::int64_t>(count, 0)); }

}  // namespace

/// Offsets of the parts, in bytes.
struct Scratch::Layout {
  explicit Layout(const ScratchSizes& sizes) {
    const ShapeView& shape = sizes.shape;
    index_heads = padded_index_heads(shape);
    const std::int64_t attend_heads =
        shape.row_format == RowFormat::raw
            ? 0
            : static_cast<std::int64_t>(std::min(sizes.block_rows, kAttendRows)) * sizes.splits * shape.query_heads;

    index_values = take<float>(sizes.block_rows * index_heads * shape.index_dim);
    index_weights = take<float>(sizes.block_rows * index_heads);
    attend_sums = take<float>(attend_heads * shape.latent_dim);
    attend_shares = take<float2>(attend_heads);
    layers = take<LayerView>(sizes.layers);
  }

  template <typename T>
  std::size_t take(std::int64_t count) {
    const std::size_t offset = bytes;
    bytes += (size(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }

  std::int64_t index_heads;
  std::size_t index_values;
  std::size_t index_weights;
  std::size_t attend_sums;
  std::size_t attend_shares;
  std::size_t layers;
  std::size_t bytes = 0;
};

std::size_t Scratch::bytes(const ScratchSizes& sizes) { return Layout(sizes).bytes; }

Scratch::Scratch(MemoryResource& memory, const ScratchSizes& sizes)
    : sizes_(sizes), buffer_(memory, bytes(sizes), "scratch") {
  const Layout layout(sizes);
  std::byte* base = buffer_.data();
  index_queries_ = {.values = reinterpret_cast<float*>(base + layout.index_values),
                    .weights = reinterpret_cast<float*>(base + layout.index_weights),
                    .heads = static_cast<std::int32_t>(layout.index_heads)};
  attend_partials_ = {.sums = reinterpret_cast<float*>(base + layout.attend_sums),
                      .shares = reinterpret_cast<float2*>(base + layout.attend_shares)};
  layers_ = reinterpret_cast<LayerView*>(base + layout.layers);
}

}  // namespace echo
