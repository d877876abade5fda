// fetch_forecast: the rows that find_forecast has chosen, from the host into their slots; then their maps.
//
// Few thread blocks, so that no more than kRowsInFlight rows (or one for each warp of a block) are under way at any
// time: whoever else reads from the host, a recall of the next layer above all, waits behind so many, 2 or 3 us on an
// H200, and then shares the link. A warp takes a few rows at a time, of all entries in turn. Cost: the link's.
#include <algorithm>

#include "cache_manager/copy_rows.cuh"
#include "cache_manager/fetch_forecast.cuh"
#include "cache_manager/residency.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kFetchThreads = 512;
constexpr int kFetchWarps = kFetchThreads / kWarp;
constexpr std::int32_t kRowsInFlight = 96;

/// Rows that a warp has under way together.
__host__ __device__ std::int32_t rows_at_once(const LayerView& layer) {
  const std::int32_t pieces = layer.row_bytes / RowGroup::kPieceBytes;
  return pieces == 0 || RowGroup::kRound / pieces < 1 ? 1 : RowGroup::kRound / pieces;
}

__global__ __launch_bounds__(kFetchThreads) void fetch_forecast(const __grid_constant__ ForecastParams p,
                                                                ForecastLists lists, std::int32_t entries) {
  const std::int32_t stamp = forecast_at(*p.step.tick + p.block.tick_offset);
  const std::int32_t at_once = rows_at_once(p.layer);
  const std::int32_t warps = static_cast<std::int32_t>(gridDim.x) * kFetchWarps;
  std::int32_t next = static_cast<std::int32_t>(blockIdx.x) * kFetchWarps + warp_index();  // group of all
  for (std::int32_t base = 0; base < entries; base += kWarp) {
    const std::int32_t own = base + lane_index() < entries ? lists.counts[base + lane_index()] : 0;
    for (std::int32_t i = 0; i < min(kWarp, entries - base); ++i) {
      const std::int32_t count = __shfl_sync(kAllLanes, own, i);
      const std::int32_t groups = (count + at_once - 1) / at_once;
      const std::int64_t place = static_cast<std::int64_t>(base + i) * lists.cap;
      for (; next < groups; next += warps) {
        const std::int32_t first = next * at_once;
        const RowList list{lists.rows + place, lists.slots + place, count};
        RowGroup group(p.layer, list, first, min(at_once, count - first));
        for (std::int32_t round = 0; round < group.total(); round += RowGroup::kRound) {
          group.load(round);
          group.store(round);
        }
        __syncwarp();  // all lanes' bytes, then the maps
        if (lane_index() < min(at_once, count - first)) {
          publish(p.layer, list.slots[first + lane_index()], list.rows[first + lane_index()], stamp);
        }
      }
      next -= groups;
    }
  }
}

}  // namespace

void launch_fetch_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context) {
  const std::int32_t entries = forecast_entries(params);
  const std::int32_t of_block = kFetchWarps * rows_at_once(params.layer);
  const std::int32_t blocks = std::max(1, kRowsInFlight / of_block);
  const std::int64_t rows = static_cast<std::int64_t>(entries) * lists.cap;
  launch(context, fetch_forecast, std::min(static_cast<unsigned>(blocks), blocks_for(rows, of_block)), kFetchThreads, 0,
         params, lists, entries);
}

}  // namespace echo
