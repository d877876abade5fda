#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/near_lists.hpp"
#include "kernels/params.hpp"

namespace echo {

/// What select_cluster can do on a device; decided once.
struct SelectClusterPlan {
  std::int32_t largest_cluster = 0;  ///< blocks, up to 8; 0: the kernel cannot be used
  std::int32_t clusters_of_16 = 0;   ///< most that run at once
};

/// The kernel needs a GPU with thread block clusters and code for it.
SelectClusterPlan plan_select_cluster(int device);

/// Whether the kernel takes these parameters: top_k up to 4,096, rows of up to about a million scores that begin at
/// multiples of 16 bytes. Results do not depend on which kernel it is.
bool fits_select_cluster(const SelectParams& params, const SelectClusterPlan& plan);

/// One launch for the whole block. Uses what score sifted; leaves what just missed the selection, if that is wanted.
void launch_select_cluster(const SelectParams& params, const SelectClusterPlan& plan, const NearLists& near,
                           const LaunchContext& context);

}  // namespace echo
