// lookup: which of the named host rows are resident? Hits get the current tick as stamp, so that no
// slot they are in can be taken; misses are marked in a bitmap.
//
// A thread per entry, in a loop. The maps do not change during the launch: a hit exchanges a stamp
// (whoever finds an older one counts the slot), a miss sets a bit. What the histogram of ages has
// to forget is counted in shared memory first. Cost: three dependent loads per entry (selection,
// block table, slot_of) and one atomic operation; 26K entries should keep the GPU busy for 3-4 us.
#include <algorithm>

#include "cache_manager/lookup.cuh"
#include "kernels/launch.cuh"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 256;

/// Entries of a selection: entry -> host row.
struct SelectedRows {
  StepView step;
  BlockView block;
  std::int32_t top_k;
  const std::int32_t* selection;
  std::int32_t* host_rows;

  __device__ std::int32_t operator()(std::int64_t entry, const LayerView& layer, const KernelErrorView& errors) const {
    const std::int32_t row = block.first + static_cast<std::int32_t>(entry / top_k);
    const std::int32_t own = position_of(step, row, errors);
    const std::int32_t position = selection[entry];
    std::int32_t found = kNone;
    if (own != kNone && position != kNone) {
      if (position < 0 || position > own) {
        errors.raise(KernelError::bad_selection);
      } else {
        found = host_row_of(layer, step, row, position, errors);
      }
    }
    host_rows[entry] = found;
    return found;
  }
};

/// Rows of the pass: row -> host row of its new token.
struct NewRows {
  StepView step;

  __device__ std::int32_t operator()(std::int64_t row, const LayerView& layer, const KernelErrorView& errors) const {
    return new_host_row(layer, step, static_cast<std::int32_t>(row), errors);
  }
};

template <typename Rows>
__global__ __launch_bounds__(kThreads) void lookup(Rows rows, std::int64_t entries, LayerView layer,
                                                   const std::int32_t* tick, std::int32_t tick_offset, ClaimView claim,
                                                   KernelErrorView errors) {
  static_assert(kThreads == kWindow);
  __shared__ std::int32_t aged[kWindow];
  aged[threadIdx.x] = 0;
  __syncthreads();

  const std::int32_t now = *tick + tick_offset;
  std::int32_t found = 0;
  std::int32_t stamped = 0;
  std::int32_t wanted = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t entry = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; entry < entries;
       entry += stride) {
    const std::int32_t row = rows(entry, layer, errors);
    if (row == kNone) {
      continue;
    }
    ++found;
    const std::int32_t slot = layer.slot_of[row];
    if (slot != kNone) {
      const std::int32_t before = atomicExch(layer.stamp + slot, now);
      if (before != now) {
        ++stamped;
        if (in_window(before, now)) {
          atomicAdd(aged + before % kWindow, 1);
        }
      }
    } else {
      const std::uint32_t bit = 1U << (row % 32);
      const std::uint32_t before = atomicOr(claim.wanted + row / 32, bit);
      wanted += (before & bit) == 0U ? 1 : 0;
      if (before == 0U) {
        atomicOr(claim.summary + row / kRowsPerSummaryWord, 1U << (row / 32 % 32));
      }
    }
  }

  found = warp_sum(found);
  stamped = warp_sum(stamped);
  wanted = warp_sum(wanted);
  if (lane_index() == 0 && found != 0) {
    atomicAdd(&claim.state->entries, found);
    atomicAdd(&claim.state->stamped, stamped);
    atomicAdd(&claim.state->wanted, wanted);
  }
  __syncthreads();
  if (aged[threadIdx.x] != 0) {
    atomicAdd(claim.state->aged + threadIdx.x, aged[threadIdx.x]);
  }
}

template <typename Rows>
void launch_lookup(const Rows& rows, std::int64_t entries, const LayerView& layer, const std::int32_t* tick,
                   std::int32_t tick_offset, const ClaimView& claim, const LaunchContext& context) {
  const unsigned most = 4U * static_cast<unsigned>(context.multiprocessors);
  launch(context, lookup<Rows>, std::min(blocks_for(entries, kThreads), most), kThreads, 0, rows, entries, layer, tick,
         tick_offset, claim, context.errors);
}

}  // namespace

void launch_lookup_selected(const RecallParams& params, const ClaimView& claim, const LaunchContext& context) {
  const SelectedRows rows{params.step, params.block, params.shape.top_k, params.selection, params.slots};
  launch_lookup(rows, static_cast<std::int64_t>(params.block.count) * params.shape.top_k, params.layer,
                params.step.tick, params.block.tick_offset, claim, context);
}

void launch_lookup_new(const AppendParams& params, const ClaimView& claim, const LaunchContext& context) {
  launch_lookup(NewRows{params.step}, params.step.rows, params.layer, params.step.tick, 0, claim, context);
}

}  // namespace echo
