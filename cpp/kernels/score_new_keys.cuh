#pragma once
// The keys of the pass's new tokens, written by a loading warp of score.
//
// Whoever scores a key block writes the new keys in it: blocks of other thread blocks are theirs to fill. Where a
// session's rows are several groups, that includes keys of the groups before, which thread blocks then write more than
// once, the same bytes. Key blocks are fetched without them. The warp encodes the first few of a thread block's new
// keys to shared memory, where the warpgroup that comes to their block puts them into it; so nobody waits for their way
// through global memory. A new key may be the first that a thread block scores: before anything else is known, the
// inputs are brought near. Further ones, and those of products of several rows, go to the index cache first, up to
// 32 at a time, a lane four of each key's 128 dimensions, and the fetching warp waits for them before a session's
// newest blocks. Cost: where the fetching warp waits, some 2 us in a thread block that has few key blocks before a
// session's newest; 3 in a layer, where all is cold.

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

/// Has the first rows' new keys brought near before it is known which of them are the thread block's. By a warp.
__device__ inline void prefetch_new_keys(const ScoreParams& p) {
  constexpr std::int64_t kLine = ptx::kCacheLine;
  constexpr std::int64_t kMost = 4 * kWarp * kLine;
  const std::int64_t bytes = std::int64_t{p.block.count} * kQueryDim * (p.index_key_dtype == DType::f32 ? 4 : 2);
#pragma unroll 1
  for (std::int64_t at = lane_index() * kLine; at < min(bytes, kMost); at += kWarp * kLine) {
    ptx::prefetch(static_cast<const std::byte*>(p.index_key) + at);
  }
}

/// Host row of a new token, kNone if there is none or its key block is not one of the run.
__device__ inline std::int32_t host_row_in(const ScoreParams& p, const Run& run, std::int32_t row,
                                           std::int32_t position, const KernelErrorView& errors) {
  if (position == kNone || !run.has(position / kTokensPerBlock)) {
    return kNone;
  }
  return host_row_of(p.layer, p.step, row, position, errors);
}

/// Where a token's key lies in the index cache.
struct KeyPlace {
  std::uint32_t* codes;
  float* scale;

  __device__ KeyPlace(const ScoreParams& p, std::int32_t host_row) {
    std::byte* block = row_address(p.layer.index_keys, host_row / kTokensPerBlock, p.layer.index_block_bytes);
    codes = reinterpret_cast<std::uint32_t*>(index_key_address(block, host_row % kTokensPerBlock, kQueryDim));
    scale = reinterpret_cast<float*>(index_scale_address(block, host_row % kTokensPerBlock, kQueryDim));
  }
};

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
};

/// Keeps the first new keys of a thread block's runs in shared memory, for the warpgroups, and then writes them to the
/// index cache, too. `maker` is at the first run.
__device__ inline void keep_new_keys(const ScoreParams& p, RunMaker maker, const ScoreStages& shared,
                                     const KernelErrorView& errors) {
  std::int32_t row = kNone;  // lane i has the i-th
  Run run = maker.run();     // of the lane's row
  std::int32_t rows = 0;
#pragma unroll 1
  for (bool more = true; more && rows < kKeptKeys; more = maker.next()) {
    const Run& now = maker.run();
    rows = min(now.new_first + now.new_count, kKeptKeys);
    if (lane_index() >= now.new_first && lane_index() < rows) {
      row = now.rows.last - now.new_count + lane_index() - now.new_first;
      run = now;
    }
  }
  const std::int32_t position = row != kNone ? position_of(p.step, row, errors) : kNone;
#pragma unroll 1
  for (std::int32_t i = 0; i < rows; ++i) {
    KeptKey& kept = shared.kept_key(i);
    NewKeyPart part;
    part.load(p, __shfl_sync(kAllLanes, row, i));
    part.store(kept.codes, &kept.scale);
  }
  if (row != kNone) {
    shared.kept_key(lane_index()).position = position;
  }
  __syncwarp();
  if (lane_index() == 0) {
    shared.keys_kept().arrive();
  }
  const std::int32_t host_row = host_row_in(p, run, row, position, errors);
#pragma unroll 1
  for (std::int32_t i = 0; i < rows; ++i) {
    const std::int32_t target = __shfl_sync(kAllLanes, host_row, i);
    if (target != kNone) {
      const KeptKey& kept = shared.kept_key(i);
      const KeyPlace place(p, target);
      place.codes[lane_index()] = kept.codes[lane_index()];
      if (lane_index() == 0) {
        *place.scale = kept.scale;
      }
    }
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
        const KeyPlace place(p, targets[i]);
        parts[i].store(place.codes, place.scale);
      }
    }
  }
}

/// Writes all new keys in a thread block's key blocks but the first `kept` ones, and tells the fetching warp. `maker`
/// is at the first run.
__device__ inline void append_new_keys(const ScoreParams& p, RunMaker maker, std::int32_t kept,
                                       const ScoreStages& shared, const KernelErrorView& errors) {
  bool any = false;
  std::int32_t rows = 0;  // that lanes have
  std::int32_t row = kNone;
  Run run = maker.run();  // of the lane's row
  const auto append = [&] {
    std::int32_t host_row = kNone;
    if (lane_index() < rows) {
      host_row = host_row_in(p, run, row, position_of(p.step, row, errors), errors);
    }
    append_keys(p, row, host_row);
    rows = 0;
  };
#pragma unroll 1
  for (bool more = true; more; more = maker.next()) {
    const Run& now = maker.run();
#pragma unroll 1
    for (std::int32_t i = max(kept - now.new_first, 0); i < now.new_count; ++i) {
      if (lane_index() == rows) {
        row = now.rows.last - now.new_count + i;
        run = now;
      }
      any = true;
      if (++rows == kWarp) {
        append();
      }
    }
  }
  if (!any) {  // nobody waits
    return;
  }
  append();
  ptx::fence_proxy_async_global();
  __syncwarp();
  if (lane_index() == 0) {
    shared.new_keys->arrive();
  }
}

}  // namespace echo
