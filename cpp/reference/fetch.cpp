#include "reference/fetch.hpp"

#include <cstring>

namespace echo {

void fetch(ThreadPool& pool, const LayerView& layer, const std::vector<std::int32_t>& host_rows) {
  pool.parallel_for(static_cast<std::int64_t>(host_rows.size()), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int32_t row = host_rows[static_cast<std::size_t>(i)];
      std::memcpy(row_address(layer.pool, layer.slot_of[row], layer.row_bytes),
                  row_address(layer.slab, row, layer.host_stride), static_cast<std::size_t>(layer.row_bytes));
    }
  });
}

}  // namespace echo
