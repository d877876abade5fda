#pragma once

#include <array>
#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/near_lists.hpp"
#include "kernels/params.hpp"

namespace echo {

/// How many clusters run at once on a device; found once.
struct SelectClusterPlan {
  std::array<std::int32_t, 5> at_once{};  ///< clusters of 1, 2, 4, 8 and 16 blocks

  bool usable() const { return at_once[0] > 0; }
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
