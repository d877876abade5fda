#include "kernels/scratch.hpp"

#include <algorithm>

namespace echo {
namespace {

constexpr std::size_t kAlignment = 256;

/// Blocks of attend_sm90 that run at once, at most.
struct AttendBlocks {
  std::int64_t teams = 0;
  std::int64_t splits = 0;
  bool share = false;  ///< there may be more items than teams

  explicit AttendBlocks(const ScratchSizes& sizes) {
    if (suits_attend_sm90(sizes.shape, sizes.splits, sizes.block_rows)) {
      const std::int64_t items = attend_items(sizes.shape, sizes.block_rows);
      splits = sizes.splits;
      teams = std::min<std::int64_t>(items, kAttendBlocks / splits);
      share = items > 1;  // any number of teams may be left for them
    }
  }
  std::int64_t meeting() const { return splits > 1 ? teams * splits : 0; }
  std::int64_t handing() const { return share ? teams * splits : 0; }
};

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
    const AttendBlocks blocks(sizes);
    attend_parts = take<std::byte>(2 * blocks.meeting() * kAttendPartBytes);
    attend_told = take<std::uint32_t>(blocks.teams * kAttendTold);
    attend_running = take<std::byte>(blocks.handing() * kAttendRunningBytes);
    attend_ticket = take<std::uint32_t>(1);
    layers = take<LayerView>(sizes.layers);
    prefetch_queue = take<PrefetchQueue>(1);
    forecast_cap = std::min(sizes.forecast_cap, kMostForecast);
    const std::int64_t lists = static_cast<std::int64_t>(sizes.layers) * sizes.entries;
    forecast_counts = take<std::int32_t>(forecast_cap > 0 ? lists : 0);
    forecast_rows = take<std::int32_t>(lists * forecast_cap);
    forecast_slots = take<std::int32_t>(lists * forecast_cap);
    forecast_ended = take<std::int32_t>(forecast_cap > 0 ? sizes.layers : 0);
    forecast_pace = take<ForecastPace>(forecast_cap > 0 ? sizes.layers : 0);
    const std::int64_t near_rows = forecast_cap > 0 ? sizes.block_rows : 0;
    near_tokens = take<ScoredToken>(near_rows * kMostNear);
    near_counts = take<std::int32_t>(near_rows);
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
  std::size_t attend_parts;
  std::size_t attend_told;
  std::size_t attend_running;
  std::size_t attend_ticket;
  std::size_t layers;
  std::size_t prefetch_queue;
  std::int32_t forecast_cap;
  std::size_t forecast_counts;
  std::size_t forecast_rows;
  std::size_t forecast_slots;
  std::size_t forecast_ended;
  std::size_t forecast_pace;
  std::size_t near_tokens;
  std::size_t near_counts;
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
  attend_exchange_ = {.parts = base + layout.attend_parts,
                      .told = reinterpret_cast<std::uint32_t*>(base + layout.attend_told),
                      .running = base + layout.attend_running,
                      .ticket = reinterpret_cast<std::uint32_t*>(base + layout.attend_ticket)};
  layers_ = reinterpret_cast<LayerView*>(base + layout.layers);
  prefetch_queue_ = reinterpret_cast<PrefetchQueue*>(base + layout.prefetch_queue);
  forecast_ = {.counts = reinterpret_cast<std::int32_t*>(base + layout.forecast_counts),
               .rows = reinterpret_cast<std::int32_t*>(base + layout.forecast_rows),
               .slots = reinterpret_cast<std::int32_t*>(base + layout.forecast_slots),
               .ended = reinterpret_cast<std::int32_t*>(base + layout.forecast_ended),
               .pace = reinterpret_cast<ForecastPace*>(base + layout.forecast_pace),
               .cap = layout.forecast_cap};
  if (layout.forecast_cap > 0) {
    near_.tokens = reinterpret_cast<ScoredToken*>(base + layout.near_tokens);
    near_.counts = reinterpret_cast<std::int32_t*>(base + layout.near_counts);
  }
}

ForecastLists Scratch::forecast(std::int32_t layer) const {
  const std::int64_t lists = static_cast<std::int64_t>(layer) * sizes_.entries;
  return {.counts = forecast_.counts + lists,
          .rows = forecast_.rows + lists * forecast_.cap,
          .slots = forecast_.slots + lists * forecast_.cap,
          .ended = forecast_.ended + layer,
          .pace = forecast_.pace + layer,
          .cap = forecast_.cap};
}

}  // namespace echo
