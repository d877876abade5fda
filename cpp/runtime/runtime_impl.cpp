#include "runtime/runtime_impl.hpp"

#include <algorithm>
#include <string>

#include "echo/errors.hpp"
#include "runtime/backends.hpp"
#include "runtime/in_use.hpp"

namespace echo {
namespace {

void require_fit(const Plan& plan) {
  if (!plan.fits()) {
    throw CapacityError("host_tokens, gpu_slots: the runtime does not fit this machine\n" + plan.table());
  }
}

Plan plan_for(const ModelShape& shape, RuntimeConfig config, const std::string& device) {
  config.device = device;
  Plan plan = make_plan(shape, config, machine_limits(device));
  require_fit(plan);
  return plan;
}

std::shared_ptr<Backend> prepared(std::shared_ptr<Backend> backend, const Plan& plan) {
  backend->prepare(scratch_sizes(plan));
  return backend;
}

}  // namespace

RuntimeImpl::RuntimeImpl(const ModelShape& shape, const RuntimeConfig& config)
    : device_name_(resolve_device(config.device)),
      plan_(plan_for(shape, config, device_name_)),
      backend_(prepared(make_backend(device_name_, plan_.config), plan_)),
      pool_(std::make_shared<HostPool>(backend_, plan_)),
      state_(std::make_shared<DeviceState>(backend_, plan_, *pool_)),
      blocks_(std::make_unique<BlockPool>(backend_, state_, static_cast<std::int32_t>(plan_.host_blocks))),
      control_(plan_),
      open_(static_cast<std::size_t>(plan_.config.max_sessions)) {
  if (plan_.config.prefetch_cap < 0) {
    plan_.config.prefetch_cap = backend_->prefetch_cap();
  }
}

RuntimeImpl::~RuntimeImpl() { close(); }

void RuntimeImpl::require_open() const {
  if (closed_) {
    throw StateError("runtime: it is closed");
  }
}

std::vector<float> RuntimeImpl::thresholds(const Session& session) {
  const InUse in_use(in_use_);
  require_open();
  return state_->read_prediction(usable(session).index).thresholds;
}

std::int64_t RuntimeImpl::free_host_tokens() {
  const InUse in_use(in_use_);
  require_open();
  return blocks_->free_blocks() * kBlockTokens;
}

RuntimeStats RuntimeImpl::stats() {
  const InUse in_use(in_use_);
  require_open();
  return {.layers = state_->read_stats(),
          .steps = steps_,
          .prefill_tokens = prefill_tokens_,
          .sessions = std::ssize(open_) - std::count(open_.begin(), open_.end(), nullptr),
          .free_host_tokens = blocks_->free_blocks() * kBlockTokens,
          .host_tokens = plan_.config.host_tokens,
          .device_bytes = plan_.total(MemoryPlace::device),
          .host_bytes = plan_.total(MemoryPlace::host),
          .row_bytes = plan_.shape.row_bytes()};
}

CacheState RuntimeImpl::cache_state(std::int32_t layer) {
  const InUse in_use(in_use_);
  require_open();
  if (layer < 0 || layer >= plan_.shape.layers) {
    throw InvalidArgument("layer: " + std::to_string(layer) + " given, expected 0 to " +
                          std::to_string(plan_.shape.layers - 1));
  }
  return state_->read_layer(layer);
}

void RuntimeImpl::use_stream(std::uintptr_t stream) {
  const InUse in_use(in_use_);
  require_open();
  backend_->use_stream(stream);
}

void RuntimeImpl::synchronize() {
  const InUse in_use(in_use_);
  require_open();
  backend_->synchronize();
}

void RuntimeImpl::close() {
  const InUse in_use(in_use_);
  if (closed_) {
    return;
  }
  closed_ = true;
  for (const std::shared_ptr<State>& session : open_) {
    if (session != nullptr) {
      session->closed = true;
    }
  }
  backend_->retire();  // steps in flight still use all of the below
  captured_.clear();
  forward_ = {};
  blocks_.reset();
  state_.reset();
  pool_.reset();
  backend_.reset();
}

std::int32_t RuntimeImpl::take_ticks(std::size_t blocks) {
  const auto count = static_cast<std::int32_t>(blocks) + 1;  // new rows have the last one
  if (tick_ > kLastTick - count) {
    state_->forget_residency();
    tick_ = 0;
  }
  const std::int32_t first = tick_ + 1;
  tick_ += count;
  return first;
}

}  // namespace echo
