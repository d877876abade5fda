#include "host_rows.hpp"

#include <string>

#include "echo/errors.hpp"
#include "rows.hpp"

namespace echo::bench {

HostRows::HostRows(std::int64_t bytes) : memory_(0), buffer_(memory_, static_cast<std::size_t>(bytes), "host rows") {}

void HostRows::fill(std::int32_t layers, std::int32_t row_bytes, std::int64_t rows, const LaunchContext& context) {
  const auto bytes = static_cast<std::size_t>(layers * rows * row_bytes);
  if (bytes > buffer_.bytes()) {
    throw CapacityError("host rows: the case needs " + std::to_string(bytes) + " bytes, " +
                        std::to_string(buffer_.bytes()) + " are pinned");
  }
  if (layers != layers_ || row_bytes != row_bytes_ || rows != rows_) {
    launch_fill_slabs(device(), layers, row_bytes, rows, context);
    layers_ = layers;
    row_bytes_ = row_bytes;
    rows_ = rows;
  }
}

}  // namespace echo::bench
