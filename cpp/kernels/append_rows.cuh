#pragma once
// append_rows: new KV rows in their stored format, to their slots and to their host rows (the backup).
//
// A warp per row and place; both get the same words. For the slots, first the maps: rows that have one keep it, the
// others get one (claim_slots). In a launch that others wait in, other blocks write the host rows: a fence behind
// stores to the host waits until they have arrived. Lanes encode in step, so that each of their 4-byte words lies next
// to its neighbour's: stores are 128 bytes wide, also across the link. FP8: groups of 128 elements, four per lane,
// whose maximum is found by shuffles. Cost: a decode step's rows are a few kilobytes, so this is a launch and a claim;
// 512 rows of a prefill write 0.3-0.6 MB to the host, 6-12 us of link time at its rate, without being waited for.

#include "cache_manager/claim_slots.cuh"
#include "kernels/elements.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {

inline constexpr std::int32_t kAppendRows = 8;  ///< of a block, a warp each
inline constexpr std::int32_t kAppendThreads = kAppendRows * kWarp + kClaimers;

struct AppendShared {
  std::int32_t missing;
  std::int32_t rows[kAppendRows];  ///< those that need a slot
  std::int32_t slots[kAppendRows];
  ClaimShared claim;
};

/// Adds to a counter that nobody waits for.
__device__ inline void count(std::int64_t* counter, std::int32_t number) {
  if (number != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(number));
  }
}

/// Elements [first, first + count) as bf16, from a word of the row on.
__device__ inline void put_bf16(const AppendParams& p, std::int64_t first, std::int32_t count, std::uint32_t* words) {
  for (std::int32_t i = lane_index(); i < count / 2; i += kWarp) {
    words[i] = pack_bf16(load_float(p.kv, p.kv_dtype, first + 2 * i), load_float(p.kv, p.kv_dtype, first + 2 * i + 1));
  }
}

__device__ inline void put_fp8(const AppendParams& p, std::int64_t first, std::uint32_t* words) {
  static_assert(kFp8Group == 4 * kWarp);
  constexpr std::int32_t kAtOnce = 4;  // groups whose elements are under way together
  const std::int32_t groups = p.shape.latent_dim / kFp8Group;
  const std::int32_t scales = p.shape.latent_dim / 4;  // word of the first scale
  for (std::int32_t done = 0; done < groups; done += kAtOnce) {
    float values[kAtOnce][4];
#pragma unroll
    for (std::int32_t i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (std::int32_t j = 0; j < 4; ++j) {
        const std::int64_t element = first + (done + i) * kFp8Group + lane_index() * 4 + j;
        values[i][j] = done + i < groups ? load_float(p.kv, p.kv_dtype, element) : 0.0F;
      }
    }
#pragma unroll
    for (std::int32_t i = 0; i < kAtOnce; ++i) {
      float amax = 0.0F;
      for (const float value : values[i]) {
        amax = amax_with(amax, value);
      }
      const float scale = power_of_two_scale(warp_max(amax));
      for (float& value : values[i]) {
        value = scaled_down(value, scale);
      }
      if (done + i < groups) {
        words[(done + i) * kWarp + lane_index()] = pack_e4m3(values[i][0], values[i][1], values[i][2], values[i][3]);
        if (lane_index() == 0) {
          words[scales + done + i] = bits_of(scale);
        }
      }
    }
  }
  put_bf16(p, first + p.shape.latent_dim, p.shape.rope_dim, words + scales + groups);
}

/// Fetches what put_row will read into the L2 cache, without waiting.
__device__ inline void prefetch_row(const AppendParams& p, std::int32_t row) {
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  const std::int32_t bytes = p.kv_dtype == DType::u8 ? p.layer.row_bytes : dim * (p.kv_dtype == DType::f32 ? 4 : 2);
  const std::byte* first = row_address(static_cast<const std::byte*>(p.kv), row, bytes);
  for (std::int32_t done = lane_index() * ptx::kCacheLine; done < bytes; done += kWarp * ptx::kCacheLine) {
    ptx::prefetch(first + done);
  }
}

/// Encodes the new row `row` of the pass. By one warp.
__device__ inline void put_row(const AppendParams& p, std::int32_t row, std::byte* to) {
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  const std::int64_t first = static_cast<std::int64_t>(row) * dim;
  auto* words = reinterpret_cast<std::uint32_t*>(to);
  if (p.kv_dtype == DType::u8) {
    const auto* encoded = reinterpret_cast<const std::uint32_t*>(
        row_address(static_cast<const std::byte*>(p.kv), row, p.layer.row_bytes));
    for (std::int32_t i = lane_index(); i < p.layer.row_bytes / 4; i += kWarp) {
      words[i] = encoded[i];
    }
  } else if (p.shape.row_format == RowFormat::fp8_656) {
    put_fp8(p, first, words);
  } else if (p.shape.row_format == RowFormat::bf16_1152) {
    put_bf16(p, first, dim, words);
  } else {
    for (std::int32_t i = lane_index(); i < dim; i += kWarp) {
      words[i] = bits_of(load_float(p.kv, p.kv_dtype, first + i));
    }
  }
}

/// The host row of the new row `row` of the pass, if there is one. By one warp.
__device__ inline void append_to_host(const AppendParams& p, std::int32_t row, const KernelErrorView& errors) {
  const std::int32_t target = row < p.step.rows ? new_host_row(p.layer, p.step, row, errors) : kNone;
  if (target != kNone) {
    put_row(p, row, row_address(p.layer.slab, target, p.layer.host_stride));
  }
}

/// The slots of rows [first, first + kAppendRows) of the pass, those that there are, in tick `now`. By a block of
/// kAppendThreads. Which rows its claims evict is decided by `scores`. The block must not have stored to host rows: its
/// fences would wait until those have arrived there.
__device__ inline void append_to_slots(const AppendParams& p, const RowScores& scores, std::int32_t now,
                                       std::int32_t first, AppendShared& shared, const KernelErrorView& errors) {
  const std::int32_t claimer = static_cast<std::int32_t>(threadIdx.x) - kAppendRows * kWarp;
  if (threadIdx.x == 0) {
    shared.missing = 0;
  }
  __syncthreads();
  if (claimer >= 0) {
    const ClaimPlace place =
        claim_place(p.layer, now, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x));
    const Sight ahead = look_ahead(p.layer, scores, now, place, claimer, shared.claim);
    meet(0, kAppendThreads);
    if (shared.missing == 0) {
      return;
    }
    const std::int32_t evicted = claim_slots(p.layer, scores, now, place, claimer, ahead, shared.rows, shared.slots,
                                             shared.missing, shared.claim);
    meet(0, kAppendThreads);
    publish_slots(p.layer, now, claimer, shared.rows, shared.slots, shared.claim.given);
    if (claimer == 0) {
      count(&p.layer.counters->evictions, evicted);
    }
    return;
  }

  const std::int32_t row = first + warp_index();
  if (row < p.step.rows) {
    prefetch_row(p, row);
  }
  const std::int32_t target = row < p.step.rows ? new_host_row(p.layer, p.step, row, errors) : kNone;
  std::int32_t slot = kNone;
  std::int32_t listed = kNone;
  if (lane_index() == 0 && target != kNone) {
    count(&p.layer.counters->appended, 1);
    slot = look_up(p.layer, target, now);
    if (slot == kNone) {
      listed = atomicAdd(&shared.missing, 1);
      shared.rows[listed] = target;
    }
  }
  meet(0, kAppendThreads);
  if (shared.missing > 0) {
    meet(0, kAppendThreads);
    if (listed != kNone) {
      slot = shared.slots[listed];
      if (slot == kNone) {
        errors.raise(KernelError::pool_exhausted);
      }
    }
  }
  slot = __shfl_sync(kAllLanes, slot, 0);
  if (slot >= 0) {
    put_row(p, row, row_address(p.layer.pool, slot, p.layer.row_bytes));
  }
}

}  // namespace echo
