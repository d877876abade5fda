#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

/// How attend_cluster runs on a device for one shape; decided once.
struct AttendClusterPlan {
  std::int32_t splits = 0;       ///< blocks of a cluster
  std::int32_t clusters = 0;     ///< most that run at once; 0: the kernel cannot be used, attend_splits has to do
  std::byte* handing = nullptr;  ///< attend_cluster_bytes() of device memory, zero before the first launch
};

/// The kernel needs a Hopper GPU (and a build for sm_90a), rows of 512 latents and 64 rope elements in FP8 or BF16,
/// top_k a multiple of 64 and 1, 2, 4 or 8 splits.
AttendClusterPlan plan_attend_cluster(const ShapeView& shape, std::int32_t splits, int device);

/// Memory through which clusters hand over what another one goes on with, for up to `rows` query rows.
std::size_t attend_cluster_bytes(const ShapeView& shape, std::int32_t splits, std::int32_t rows);

/// One launch for the whole block, of as many thread blocks as are returned, each with a multiprocessor of its own.
/// Throws InvalidArgument naming `q`, `slots` or `out` where they are not aligned to 16 bytes.
int launch_attend_cluster(const AttendParams& params, const AttendClusterPlan& plan, const LaunchContext& context);

}  // namespace echo
