#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo::bench {

/// Writes every row of slabs that follow each other, one a layer, through their device alias; see row_word.
void launch_fill_slabs(std::byte* slabs, std::int32_t layers, std::int32_t row_bytes, std::int64_t host_rows,
                       const LaunchContext& context);

inline constexpr float kKthScore = 1.0F;

/// Scores below the k-th score, [kLayers, rows, stride], and the k-th score of each row: what is not selected.
void launch_fill_scores(float* scores, std::int64_t stride, float* kth_score, const StepView& step, std::uint32_t seed,
                        const LaunchContext& context);

/// kv [layers, rows, dims] bf16 for the positions of the step; see kv_element.
void launch_fill_kv(std::uint16_t* kv, std::int32_t layers, std::int32_t dims, const StepView& step,
                    const LaunchContext& context);

/// Reads `bytes` of device memory, so that little else stays in the L2 cache.
void launch_touch(const std::byte* data, std::size_t bytes, std::uint32_t* sink, const LaunchContext& context);

/// Rows of a slab.
struct GatherParams {
  const std::byte* slab;
  std::int64_t host_stride;
  std::int32_t row_bytes;
  const std::int32_t* rows;  ///< [count]
  std::int32_t count;
  std::byte* target;  ///< [count, row_bytes]
};

/// The ceiling of recall: nothing but the reads, with `blocks` blocks of 512 threads.
void launch_gather(const GatherParams& params, std::int32_t blocks, const LaunchContext& context);

}  // namespace echo::bench
