#include "runtime/host_pool.hpp"

namespace echo {

HostPool::HostPool(std::shared_ptr<Backend> backend, const Plan& plan)
    : backend_(std::move(backend)),
      memory_(backend_->host_memory(), static_cast<std::size_t>(plan.bytes_of("host_pool")), "host_pool"),
      stride_(plan.host_row_stride),
      slab_bytes_(plan.config.host_tokens * stride_) {}

}  // namespace echo
