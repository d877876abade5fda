// append_rows: new KV rows in their stored format, to the host row and to the slot.
//
// A warp per row. Lanes encode in step, so that each of their 4-byte words lies next to its
// neighbour's: stores are 128 bytes wide, also across the link. FP8: a round per group of 128
// elements, four per lane, whose maximum is found by shuffles. Slot and host row get the same
// words. Cost: a decode step's rows are a few kilobytes, so this is the time of a launch; 512 rows
// of a prefill write 0.3-0.6 MB to the host, 6-12 us of link time at its rate, without being waited for.
#include "kernels/append_rows.hpp"
#include "kernels/elements.cuh"
#include "kernels/launch.cuh"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {
namespace {

constexpr int kThreads = 128;
constexpr int kGroup = kFp8Group;  ///< four elements per lane
static_assert(kGroup == 4 * kWarp);

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
__device__ void put_bf16(const AppendParams& p, std::int64_t first, std::int32_t count, std::int32_t word,
                         const RowTarget& target) {
  for (std::int32_t i = lane_index(); i < count / 2; i += kWarp) {
    target.put(word + i,
               pack_bf16(load_float(p.kv, p.kv_dtype, first + 2 * i), load_float(p.kv, p.kv_dtype, first + 2 * i + 1)));
  }
}

__device__ void put_fp8(const AppendParams& p, std::int64_t first, const RowTarget& target) {
  const std::int32_t groups = p.shape.latent_dim / kGroup;
  const std::int32_t scales = p.shape.latent_dim / 4;  // word of the first scale
  for (std::int32_t group = 0; group < groups; ++group) {
    float values[4];
    float amax = 0.0F;
    for (int i = 0; i < 4; ++i) {
      values[i] = load_float(p.kv, p.kv_dtype, first + group * kGroup + lane_index() * 4 + i);
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

__device__ void put_words(const std::uint32_t* words, std::int32_t count, const RowTarget& target) {
  for (std::int32_t i = lane_index(); i < count; i += kWarp) {
    target.put(i, words[i]);
  }
}

__global__ __launch_bounds__(kThreads) void append_rows(AppendParams p, KernelErrorView errors) {
  constexpr std::int32_t kRows = kThreads / kWarp;
  const std::int32_t row = static_cast<std::int32_t>(blockIdx.x) * kRows + warp_index();
  if (row >= p.step.rows) {
    return;
  }
  const std::int32_t host_row = new_host_row(p.layer, p.step, row, errors);
  if (host_row == kNone) {
    return;
  }
  const std::int32_t slot = p.layer.slot_of[host_row];
  const RowTarget target{
      reinterpret_cast<std::uint32_t*>(row_address(p.layer.slab, host_row, p.layer.host_stride)),
      slot == kNone ? nullptr : reinterpret_cast<std::uint32_t*>(row_address(p.layer.pool, slot, p.layer.row_bytes))};
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  const std::int64_t first = static_cast<std::int64_t>(row) * dim;
  if (p.kv_dtype == DType::u8) {
    put_words(reinterpret_cast<const std::uint32_t*>(
                  row_address(static_cast<const std::byte*>(p.kv), row, p.layer.row_bytes)),
              p.layer.row_bytes / 4, target);
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

}  // namespace

void launch_append_rows(const AppendParams& params, const LaunchContext& context) {
  launch(context, append_rows, blocks_for(params.step.rows, kThreads / kWarp), kThreads, 0, params, context.errors);
}

}  // namespace echo
