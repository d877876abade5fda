#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo::bench {

/// Random codes for all index keys of all layers; their scales follow from launch_scale_keys.
void launch_fill_index_keys(const LayerView* layers, std::int32_t layer_count, const LaunchContext& context);

/// Scales of the index keys in step `time`, so that scores are distributed, and change from step to step, as those of a
/// model: a row of consecutive host rows for each entry of the batch, of which those from `first_new` on are left
/// alone.
struct ScaleParams {
  const LayerView* layers;
  std::int32_t layer_count;
  std::int32_t batch;
  std::int32_t session_rows;
  std::int32_t first_new;
  std::uint32_t time;
};
void launch_scale_keys(const ScaleParams& params, const LaunchContext& context);

/// Normally distributed bf16 numbers.
void launch_fill_normal(std::uint16_t* values, std::int64_t count, float deviation, std::uint32_t seed,
                        const LaunchContext& context);
/// Weights of index heads, all positive.
void launch_fill_weights(float* weights, std::int64_t count, std::uint32_t seed, const LaunchContext& context);

/// Reads host memory here and there, so that address translations are not warm.
void launch_wander(const std::byte* host, std::size_t bytes, std::uint32_t seed, std::uint32_t* sink,
                   const LaunchContext& context);

}  // namespace echo::bench
