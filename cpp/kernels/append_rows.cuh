#pragma once
// append_rows: new KV rows in their stored format, to their host rows (the backup) and to their slots, by one block.
//
// A warp per row. First the maps: rows that have a slot keep it, the others get one (claim_slots). Then lanes encode in
// step, so that each of their 4-byte words lies next to its neighbour's: stores are 128 bytes wide, also across the
// link. FP8: a round per group of 128 elements, four per lane, whose maximum is found by shuffles. Slot and host row
// get the same words. Cost: a decode step's rows are a few kilobytes, so this is a launch and a claim; 512 rows of a
// prefill write 0.3-0.6 MB to the host, 6-12 us of link time at its rate, without being waited for.

#include "cache_manager/claim_slots.cuh"
#include "kernels/elements.cuh"
#include "kernels/params.hpp"
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

/// The places of one row.
struct RowTarget {
  std::uint32_t* host;
  std::uint32_t* slot;  ///< null where the row has none

  __device__ void put(std::int32_t word, std::uint32_t value) const {
    host[word] = value;
    if (slot != nullptr) {
      slot[word] = value;
    }
  }
};

/// Elements [first, first + count) as bf16, from `word` on.
__device__ inline void put_bf16(const AppendParams& p, std::int64_t first, std::int32_t count, std::int32_t word,
                                const RowTarget& target) {
  for (std::int32_t i = lane_index(); i < count / 2; i += kWarp) {
    target.put(word + i,
               pack_bf16(load_float(p.kv, p.kv_dtype, first + 2 * i), load_float(p.kv, p.kv_dtype, first + 2 * i + 1)));
  }
}

__device__ inline void put_fp8(const AppendParams& p, std::int64_t first, const RowTarget& target) {
  static_assert(kFp8Group == 4 * kWarp);
  const std::int32_t groups = p.shape.latent_dim / kFp8Group;
  const std::int32_t scales = p.shape.latent_dim / 4;  // word of the first scale
  for (std::int32_t group = 0; group < groups; ++group) {
    float values[4];
    float amax = 0.0F;
    for (int i = 0; i < 4; ++i) {
      values[i] = load_float(p.kv, p.kv_dtype, first + group * kFp8Group + lane_index() * 4 + i);
      amax = amax_with(amax, values[i]);
    }
    const float scale = power_of_two_scale(warp_max(amax));
    for (float& value : values) {
      value = scaled_down(value, scale);
    }
    target.put(group * kWarp + lane_index(), pack_e4m3(values[0], values[1], values[2], values[3]));
    if (lane_index() == 0) {
      target.put(scales + group, bits_of(scale));
    }
  }
  put_bf16(p, first + p.shape.latent_dim, p.shape.rope_dim, scales + groups, target);
}

/// Encodes the new row `row` of the pass. By one warp.
__device__ inline void put_row(const AppendParams& p, std::int32_t row, const RowTarget& target) {
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  const std::int64_t first = static_cast<std::int64_t>(row) * dim;
  if (p.kv_dtype == DType::u8) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(
        row_address(static_cast<const std::byte*>(p.kv), row, p.layer.row_bytes));
    for (std::int32_t i = lane_index(); i < p.layer.row_bytes / 4; i += kWarp) {
      target.put(i, words[i]);
    }
  } else if (p.shape.row_format == RowFormat::fp8_656) {
    put_fp8(p, first, target);
  } else if (p.shape.row_format == RowFormat::bf16_1152) {
    put_bf16(p, first, dim, 0, target);
  } else {
    for (std::int32_t i = lane_index(); i < dim; i += kWarp) {
      target.put(i, bits_of(load_float(p.kv, p.kv_dtype, first + i)));
    }
  }
}

/// Rows [first, first + kAppendRows) of the pass, those that there are, in tick `now`. By a block of kAppendThreads.
/// Which rows its claims evict is decided by `scores` and `place`.
__device__ inline void append_rows(const AppendParams& p, const RowScores& scores, std::int32_t now,
                                   const ClaimPlace& place, std::int32_t first, AppendShared& shared,
                                   const KernelErrorView& errors) {
  const std::int32_t claimer = static_cast<std::int32_t>(threadIdx.x) - kAppendRows * kWarp;
  if (threadIdx.x == 0) {
    shared.missing = 0;
  }
  __syncthreads();
  if (claimer >= 0) {
    Sight ahead;
    if (p.to_slots) {
      ahead = look_ahead(p.layer, scores, now, place, claimer);
      if (claimer == 0) {
        shared.claim.free = AtomicWord(p.layer.replacement->free).load(cuda::memory_order_relaxed);
      }
    }
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
  const std::int32_t target = row < p.step.rows ? new_host_row(p.layer, p.step, row, errors) : kNone;
  std::int32_t slot = kNone;
  std::int32_t listed = kNone;
  if (lane_index() == 0 && target != kNone) {
    if (p.to_slots) {
      count(&p.layer.counters->appended, 1);
      slot = look_up(p.layer, target, now);
      if (slot == kNone) {
        listed = atomicAdd(&shared.missing, 1);
        shared.rows[listed] = target;
      }
    } else {
      release_row(p.layer, target);  // what a slot holds of it would be out of date
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
  if (target != kNone) {
    put_row(
        p, row,
        {reinterpret_cast<std::uint32_t*>(row_address(p.layer.slab, target, p.layer.host_stride)),
         slot < 0 ? nullptr : reinterpret_cast<std::uint32_t*>(row_address(p.layer.pool, slot, p.layer.row_bytes))});
  }
}

}  // namespace echo
