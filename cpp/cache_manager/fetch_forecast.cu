// fetch_forecast: the rows that find_forecast has chosen, from the host into their slots; then their maps.
//
// Two thread blocks, which go on beside attention, the model and the score of the next layer, on multiprocessors that
// those leave: one alone brings 14 rows per us over an H200's link, two 24. A warp takes a few rows at a time, of
// all entries in turn; the list of the next ones is read while the bytes of these are on their way. When there is no
// more time, since the next select has begun, the rest is given up and its slots are free: what is under way then, 8 us
// of the link at most, has arrived before the next recall asks for rows. Nobody looks at a map before the launch has
// ended, which orders all of it. Cost: the link's.
#include "cache_manager/copy_rows.cuh"
#include "cache_manager/fetch_forecast.cuh"
#include "cache_manager/forecast_pace.cuh"
#include "cache_manager/residency.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 2;

/// Rows that a warp has under way together.
__host__ __device__ std::int32_t rows_at_once(const LayerView& layer) {
  const std::int32_t pieces = layer.row_bytes / RowGroup::kPieceBytes;
  const std::int32_t rows = pieces == 0 ? 1 : RowGroup::kRound / pieces;
  return rows < 1 ? 1 : (rows > kWarp ? kWarp : rows);
}

/// The groups of rows of a warp, one after the other, by entries.
class Groups {
 public:
  __device__ Groups(const ForecastLists& lists, std::int32_t entries, std::int32_t at_once)
      : lists_(lists),
        entries_(entries),
        at_once_(at_once),
        next_(static_cast<std::int32_t>(blockIdx.x) * kWarps + warp_index()) {
    read_counts();
  }

  /// Goes to the next group; false if there is none.
  __device__ bool advance() {
    for (; entry_ < entries_; ++entry_) {
      if (entry_ % kWarp == 0 && entry_ > 0 && entry_ != base_) {
        base_ = entry_;
        read_counts();
      }
      const std::int32_t count = __shfl_sync(kAllLanes, counts_, entry_ % kWarp);
      const std::int32_t groups = (count + at_once_ - 1) / at_once_;
      if (next_ < groups) {
        first_ = static_cast<std::int64_t>(entry_) * lists_.cap + next_ * at_once_;
        rows_ = min(at_once_, count - next_ * at_once_);
        next_ += static_cast<std::int32_t>(gridDim.x) * kWarps;
        return true;
      }
      next_ -= groups;
    }
    rows_ = 0;
    return false;
  }

  __device__ std::int64_t first() const { return first_; }
  __device__ std::int32_t rows() const { return rows_; }

 private:
  __device__ void read_counts() {
    const std::int32_t entry = base_ + lane_index();
    counts_ = entry < entries_ ? lists_.counts[entry] : 0;
  }

  const ForecastLists& lists_;
  std::int32_t entries_;
  std::int32_t at_once_;
  std::int32_t next_;  ///< group of the entry, this warp's
  std::int32_t entry_ = 0;
  std::int32_t base_ = 0;    ///< first entry whose counts are known
  std::int32_t counts_ = 0;  ///< of entry base_ + lane
  std::int64_t first_ = 0;   ///< place in the lists
  std::int32_t rows_ = 0;
};

__device__ void give_back(const LayerView& layer, std::int32_t row, std::int32_t slot) {
  give_up_row(layer, row);
  layer.host_of[slot] = kNone;
  layer.stamp[slot] = kFree;
  layer.free_slots[atomicAdd(&layer.replacement->free, 1)] = slot;
}

__global__ __launch_bounds__(kThreads) void fetch_forecast(const __grid_constant__ ForecastParams p,
                                                           ForecastLists lists, std::int32_t entries) {
  __shared__ std::int32_t rows[kWarps][kWarp];
  __shared__ std::int32_t slots[kWarps][kWarp];
  const std::int32_t now = *p.step.tick + p.block.tick_offset;
  const std::int32_t lane = lane_index();
  const RowList list{rows[warp_index()], slots[warp_index()], kWarp};
  std::int32_t fetched = 0;
  std::int32_t left = 0;
  bool late = false;
  Groups groups(lists, entries, rows_at_once(p.layer));
  bool any = groups.advance();
  std::int32_t row = lane < groups.rows() ? lists.rows[groups.first() + lane] : kNone;
  std::int32_t slot = lane < groups.rows() ? lists.slots[groups.first() + lane] : kNone;
  while (any) {
    const std::int32_t count = groups.rows();
    const std::int32_t own_row = row;
    const std::int32_t own_slot = slot;
    __syncwarp();
    rows[warp_index()][lane] = own_row;
    slots[warp_index()][lane] = own_slot;
    __syncwarp();
    RowGroup group(p.layer, list, 0, late ? 0 : count);
    group.load(0);
    const bool over = AtomicWord(*lists.ended).load(cuda::memory_order_relaxed) != 0;
    any = groups.advance();
    row = lane < groups.rows() ? lists.rows[groups.first() + lane] : kNone;
    slot = lane < groups.rows() ? lists.slots[groups.first() + lane] : kNone;
    group.store(0);
    group.copy(RowGroup::kRound);
    if (own_row != kNone && late) {
      give_back(p.layer, own_row, own_slot);
    } else if (own_row != kNone) {
      stamp_word(p.layer, own_slot).store(forecast_at(now), cuda::memory_order_relaxed);
      slot_word(p.layer, own_row).store(own_slot, cuda::memory_order_relaxed);
    }
    fetched += late ? 0 : count;
    left += late ? count : 0;
    late = late || __any_sync(kAllLanes, over);
  }
  if (lane == 0) {
    count(&p.layer.counters->forecast, fetched);
    add_to_pace(*lists.pace, fetched, left, entries, gridDim.x * kWarps);
  }
}

}  // namespace

int fetch_forecast_blocks() { return kBlocks; }

void launch_fetch_forecast(const ForecastParams& params, const ForecastLists& lists, const LaunchContext& context) {
  launch(context, fetch_forecast, kBlocks, kThreads, 0, params, lists, forecast_entries(params));
}

}  // namespace echo
