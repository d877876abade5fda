// append: the new rows of a pass (append_rows.cuh) and their index keys, in one launch.
//
// A warp per row, 8 rows per block; the same warp then encodes the row's index key, four elements per lane and round.
// FP8 keys are read twice, first for their largest magnitude, from which the key's power-of-two scale follows, then for
// the codes; the second time they come from the L1 cache. The scale goes behind the 64 keys of the block. Cost: that
// of a launch.
#include "kernels/append.hpp"

#include "kernels/append_rows.cuh"
#include "kernels/launch.cuh"

namespace echo {
namespace {

constexpr int kAppendRows = 8;  ///< of a block, a warp each

__device__ void put_fp8_key(const AppendParams& p, std::int64_t first, std::byte* block, std::int32_t in_block) {
  const std::int32_t dim = p.shape.index_dim;
  float amax = 0.0F;
  for (std::int32_t i = lane_index(); i < dim; i += kWarp) {
    amax = amax_with(amax, load_float(p.index_key, p.index_key_dtype, first + i));
  }
  const float scale = power_of_two_scale(warp_max(amax));
  auto* codes = reinterpret_cast<std::uint32_t*>(index_key_address(block, in_block, dim));
  for (std::int32_t word = lane_index(); word < dim / 4; word += kWarp) {
    float values[4];
    for (int i = 0; i < 4; ++i) {
      values[i] = scaled_down(load_float(p.index_key, p.index_key_dtype, first + word * 4 + i), scale);
    }
    codes[word] = pack_e4m3(values[0], values[1], values[2], values[3]);
  }
  if (lane_index() == 0) {
    *reinterpret_cast<float*>(index_scale_address(block, in_block, dim)) = scale;
  }
}

__device__ void put_key(const AppendParams& p, std::int32_t row, const KernelErrorView& errors) {
  const std::int32_t host_row = new_host_row(p.layer, p.step, row, errors);
  if (host_row == kNone) {
    return;
  }
  const std::int32_t dim = p.shape.index_dim;
  const std::int64_t first = static_cast<std::int64_t>(row) * dim;
  std::byte* block = row_address(p.layer.index_keys, host_row / kTokensPerBlock, p.layer.index_block_bytes);
  const std::int32_t in_block = host_row % kTokensPerBlock;
  if (p.shape.index_key_format == IndexKeyFormat::fp8) {
    put_fp8_key(p, first, block, in_block);
    return;
  }
  constexpr auto kElementBytes = static_cast<std::int32_t>(sizeof(float));
  auto* key = reinterpret_cast<float*>(index_key_address(block, in_block, dim * kElementBytes));
  for (std::int32_t i = lane_index(); i < dim; i += kWarp) {
    key[i] = load_float(p.index_key, p.index_key_dtype, first + i);
  }
}

__global__ __launch_bounds__(kAppendRows* kWarp) void append(AppendParams p, KernelErrorView errors) {
  const std::int32_t row = static_cast<std::int32_t>(blockIdx.x) * kAppendRows + warp_index();
  if (p.index_key != nullptr && row < p.step.rows) {
    put_key(p, row, errors);
  }
  if (p.kv != nullptr) {
    append_row(p, row, {}, errors);
  }
}

}  // namespace

void launch_append(const AppendParams& params, const LaunchContext& context) {
  launch(context, append, blocks_for(params.step.rows, kAppendRows), kAppendRows * kWarp, 0, params, context.errors);
}

}  // namespace echo
