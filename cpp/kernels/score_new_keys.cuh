#pragma once
// The keys of the pass's new tokens, written by a loading warp of score before their blocks are fetched.
//
// Whoever scores a key block writes the new keys in it: blocks of other thread blocks are theirs to fill. Where a
// session's rows are several groups, that includes keys of the groups before, which thread blocks then write more than
// once, the same bytes. A lane takes a row and finds out whether its key is in the run; then the warp encodes such
// rows, four at once, a lane four of each one's 128 dimensions. Meanwhile the first key blocks are on their way: the
// fetching warp waits only before a session's newest blocks. Cost: nothing that is waited for, but where a thread block
// begins with such a block: some 2 us.

#include "kernels/elements.cuh"
#include "kernels/score_runs.cuh"
#include "kernels/score_stages.cuh"

namespace echo {

inline constexpr int kKeysAtOnce = 4;

/// The lane's four elements of a new key.
struct NewKeyPart {
  float values[4];

  __device__ void load(const ScoreParams& p, std::int32_t row) {
    const std::int64_t first = static_cast<std::int64_t>(row) * kQueryDim + lane_index() * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = load_float(p.index_key, p.index_key_dtype, first + i);
    }
  }
  /// By all lanes: the key, to its place in the index cache.
  __device__ void store(const ScoreParams& p, std::int32_t host_row) const {
    float amax = 0.0F;
#pragma unroll
    for (const float value : values) {
      amax = amax_with(amax, value);
    }
    const float scale = power_of_two_scale(warp_max(amax));
    std::byte* block = row_address(p.layer.index_keys, host_row / kTokensPerBlock, p.layer.index_block_bytes);
    const std::int32_t in_block = host_row % kTokensPerBlock;
    reinterpret_cast<std::uint32_t*>(index_key_address(block, in_block, kQueryDim))[lane_index()] =
        pack_e4m3(scaled_down(values[0], scale), scaled_down(values[1], scale), scaled_down(values[2], scale),
                  scaled_down(values[3], scale));
    if (lane_index() == 0) {
      *reinterpret_cast<float*>(index_scale_address(block, in_block, kQueryDim)) = scale;
    }
  }
};

/// Writes the keys of the lanes' rows, whose tokens go to these host rows; kNone: a lane has none.
__device__ inline void append_keys(const ScoreParams& p, std::int32_t row, std::int32_t host_row) {
#pragma unroll 1
  for (unsigned left = __ballot_sync(kAllLanes, host_row != kNone); left != 0U;) {
    NewKeyPart parts[kKeysAtOnce];
    std::int32_t targets[kKeysAtOnce];
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      const int lane = left != 0U ? __ffs(static_cast<int>(left)) - 1 : 0;
      targets[i] = left != 0U ? __shfl_sync(kAllLanes, host_row, lane) : kNone;
      if (targets[i] != kNone) {
        parts[i].load(p, __shfl_sync(kAllLanes, row, lane));
      }
      left &= left - 1U;
    }
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      if (targets[i] != kNone) {
        parts[i].store(p, targets[i]);
      }
    }
  }
}

/// Writes all new keys in a thread block's key blocks, and tells the fetching warp. `maker` is at the first run.
__device__ inline void append_new_keys(const ScoreParams& p, RunMaker maker, const ScoreStages& shared,
                                       const KernelErrorView& errors) {
  std::int32_t rows = 0;  // that lanes have
  std::int32_t row = kNone;
  Run run = maker.run();  // of the lane's row
  const auto append = [&] {
    std::int32_t host_row = kNone;
    if (lane_index() < rows) {
      const std::int32_t position = position_of(p.step, row, errors);
      if (position != kNone && run.has(position / kTokensPerBlock)) {
        host_row = host_row_of(p.layer, p.step, row, position, errors);
      }
    }
    append_keys(p, row, host_row);
    rows = 0;
  };
#pragma unroll 1
  for (bool more = true; more; more = maker.next()) {
    const GroupRows group = maker.run().rows;
#pragma unroll 1
    for (std::int32_t next = max(group.entry * p.step.query_rows, p.block.first); next < group.last; ++next) {
      if (lane_index() == rows) {
        row = next;
        run = maker.run();
      }
      if (++rows == kWarp) {
        append();
      }
    }
  }
  append();
  ptx::fence_proxy_async_global();
  __syncwarp();
  if (lane_index() == 0) {
    shared.new_keys->arrive();
  }
}

}  // namespace echo
