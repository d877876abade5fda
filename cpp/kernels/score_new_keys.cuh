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

/// Byte of the scale of a key of a block as the copy engine lays it down: two rows behind the keys, swizzled like them.
__device__ inline std::uint32_t scale_byte(std::int32_t token) {
  const auto byte = static_cast<std::uint32_t>(token) * static_cast<std::uint32_t>(sizeof(float));
  return ptx::swizzled(kTokensPerBlock + byte / kMapRowBytes, byte % kMapRowBytes);
}

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
  /// By all lanes: the key's codes, of the lane's elements, and its scale.
  __device__ void store(std::uint32_t* codes, float* scale_at) const {
    float amax = 0.0F;
#pragma unroll
    for (const float value : values) {
      amax = amax_with(amax, value);
    }
    const float scale = power_of_two_scale(warp_max(amax));
    codes[lane_index()] = pack_e4m3(scaled_down(values[0], scale), scaled_down(values[1], scale),
                                    scaled_down(values[2], scale), scaled_down(values[3], scale));
    if (lane_index() == 0) {
      *scale_at = scale;
    }
  }
  /// To its place in the index cache.
  __device__ void store(const ScoreParams& p, std::int32_t host_row) const {
    std::byte* block = row_address(p.layer.index_keys, host_row / kTokensPerBlock, p.layer.index_block_bytes);
    const std::int32_t in_block = host_row % kTokensPerBlock;
    store(reinterpret_cast<std::uint32_t*>(index_key_address(block, in_block, kQueryDim)),
          reinterpret_cast<float*>(index_scale_address(block, in_block, kQueryDim)));
  }
};

/// Keeps the first new keys of a thread block's runs in shared memory, before it is known where they go. `maker` is at
/// the first run.
__device__ inline void keep_new_keys(const ScoreParams& p, RunMaker maker, const ScoreStages& shared,
                                     const KernelErrorView& errors) {
  std::int32_t row = kNone;  // lane i has the i-th
  std::int32_t rows = 0;
#pragma unroll 1
  for (bool more = true; more && rows < kKeptKeys; more = maker.next()) {
    const Run& run = maker.run();
    const std::int32_t place = lane_index() - run.new_first;
    if (place >= 0 && place < run.new_count && lane_index() < kKeptKeys) {
      row = run.rows.last - run.new_count + place;
    }
    rows = min(run.new_first + run.new_count, kKeptKeys);
  }
#pragma unroll 1
  for (std::int32_t first = 0; first < rows; first += kKeysAtOnce) {
    NewKeyPart parts[kKeysAtOnce];
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      parts[i].load(p, __shfl_sync(kAllLanes, row, min(first + i, rows - 1)));
    }
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      KeptKey& kept = shared.kept_key(min(first + i, rows - 1));
      parts[i].store(kept.codes, &kept.scale);
    }
  }
  if (row != kNone) {
    shared.kept_key(lane_index()).position = position_of(p.step, row, errors);
  }
  __syncwarp();
  if (lane_index() == 0) {
    shared.keys_kept().arrive();
  }
}

/// By a warpgroup: puts kept keys into the block in a stage, which was fetched without them.
__device__ inline void put_kept_keys(const ScoreStages& shared, const StageWork& work, std::byte* keys, int warp) {
  shared.keys_kept().wait(0);
#pragma unroll 1
  for (std::int32_t i = warp % kGroupWarps; i < work.new_count; i += kGroupWarps) {
    const KeptKey& key = shared.kept_key(work.new_first + i);
    const std::int32_t token = key.position - work.token;
    if (key.position != kNone && token >= 0 && token < kTokensPerBlock) {
      const auto lane = static_cast<std::uint32_t>(lane_index());
      *reinterpret_cast<std::uint32_t*>(keys + ptx::swizzled(static_cast<std::uint32_t>(token), lane * 4)) =
          key.codes[lane];
      if (lane == 0) {
        *reinterpret_cast<float*>(keys + scale_byte(token)) = key.scale;
      }
    }
  }
  ptx::fence_proxy_async();
  meet(kKeysPut + warp / kGroupWarps, kGroupWarps * kWarp);
}

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
