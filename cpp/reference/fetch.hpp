#pragma once

#include <cstdint>
#include <vector>

#include "cache_manager/layer_view.hpp"
#include "reference/thread_pool.hpp"

namespace echo {

/// Copies host rows, each of which has a slot, to their slots; in parallel.
void fetch(ThreadPool& pool, const LayerView& layer, const std::vector<std::int32_t>& host_rows);

}  // namespace echo
