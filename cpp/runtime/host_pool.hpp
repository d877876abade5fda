#pragma once

#include <cstdint>
#include <memory>

#include "cache_manager/address.hpp"
#include "echo/planner.hpp"
#include "runtime/backend.hpp"

namespace echo {

/// All rows of all layers on the host, layer after layer ("slabs"): one layer's recalls stay within one slab, which
/// is what address translation rewards. Shared by the runtime and by views that were handed out.
class HostPool {
 public:
  HostPool(std::shared_ptr<Backend> backend, const Plan& plan);

  std::byte* slab(std::int32_t layer) const { return memory_.data() + layer * slab_bytes_; }
  /// The slab as kernels see it.
  std::byte* device_slab(std::int32_t layer) const { return memory_.device() + layer * slab_bytes_; }
  std::byte* row(std::int32_t layer, std::int64_t host_row) const {
    return row_address(slab(layer), host_row, stride_);
  }

 private:
  std::shared_ptr<Backend> backend_;  // its memory resource must outlive the memory
  Buffer memory_;
  std::int64_t stride_;
  std::int64_t slab_bytes_;
};

}  // namespace echo
