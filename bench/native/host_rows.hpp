#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/pinned_memory.hpp"

namespace echo::bench {

/// The host pool, pinned once as the product does it and carved into slabs anew for each case.
class HostRows {
 public:
  explicit HostRows(std::int64_t bytes);

  /// Gives every row its bytes (row_word), unless they are there already. CapacityError if the rows do not fit.
  void fill(std::int32_t layers, std::int32_t row_bytes, std::int64_t rows, const LaunchContext& context);
  /// Says that rows were overwritten.
  void spoil() { row_bytes_ = 0; }

  const std::byte* data() const { return buffer_.data(); }
  std::byte* device() const { return buffer_.device(); }
  std::size_t bytes() const { return buffer_.bytes(); }

 private:
  PinnedMemory memory_;
  Buffer buffer_;
  std::int32_t layers_ = 0;  ///< what the slabs are filled for
  std::int32_t row_bytes_ = 0;
  std::int64_t rows_ = 0;
};

}  // namespace echo::bench
