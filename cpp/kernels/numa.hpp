#pragma once

#include <cstddef>

namespace echo {

/// NUMA node next to a GPU; -1 where the machine has one node or does not say.
int numa_node_of_device(int device);

/// Asks for the (still untouched) pages of a range on a node; a preference, which may fail
/// silently.
void prefer_numa_node(void* address, std::size_t bytes, int node) noexcept;

}  // namespace echo
