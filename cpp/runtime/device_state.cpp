#include "runtime/device_state.hpp"

#include <algorithm>
#include <numeric>

namespace echo {
namespace {
/// All bits set: -1 as an integer ("none", "free"), NaN as a float ("unknown").
constexpr int kUnset = 0xFF;
}  // namespace

DeviceState::DeviceState(std::shared_ptr<Backend> backend, const Plan& plan, const HostPool& pool)
    : backend_(std::move(backend)), step_rows_(plan.config.max_batch * plan.config.query_rows) {
  MemoryResource& memory = backend_->device_memory();
  const auto allocate = [&](const char* name, int byte) {
    Buffer buffer(memory, static_cast<std::size_t>(plan.bytes_of(name)), name);
    backend_->fill(buffer.data(), byte, buffer.bytes());
    return buffer;
  };
  replacement_ = allocate("replacement", 0);
  counters_ = allocate("counters", 0);
  scores_ = allocate("scores", kUnset);
  selection_ = allocate("selection", kUnset);
  selected_slots_ = allocate("selected_slots", kUnset);
  kth_score_ = allocate("kth_score", kUnset);
  thresholds_ = allocate("thresholds", kUnset);
  deviations_ = allocate("deviations", kUnset);
  if (plan.sift_capacity > 0) {
    sift_rows_ = allocate("sift_rows", kUnset);
    prefetched_ = allocate("prefetched", kUnset);
    candidates_ = allocate("candidates", kUnset);
  }
  control_ = allocate("control_block", kUnset);
  owners_ = allocate("owners", kUnset);
  for (std::int32_t layer = 0; layer < plan.shape.layers; ++layer) {
    // Rows and keys start as NaN patterns: what was never written must never be read.
    buffers_.push_back({.slots = allocate("slots", kUnset),
                        .index_keys = allocate("index_keys", kUnset),
                        .slot_of = allocate("slot_of", kUnset),
                        .host_of = allocate("host_of", kUnset),
                        .stamp = allocate("stamp", kUnset),
                        .free_slots = allocate("free_slots", kUnset)});
    const LayerBuffers& own = buffers_.back();
    views_.push_back({.pool = own.slots.data(),
                      .slab = pool.device_slab(layer),
                      .slot_of = own.slot_of.data<std::int32_t>(),
                      .host_of = own.host_of.data<std::int32_t>(),
                      .stamp = own.stamp.data<std::int32_t>(),
                      .free_slots = own.free_slots.data<std::int32_t>(),
                      .index_keys = own.index_keys.data(),
                      .replacement = replacement_.data<ReplacementState>() + layer,
                      .counters = counters_.data<LayerCounters>() + layer,
                      .slots = static_cast<std::int32_t>(plan.config.gpu_slots),
                      .row_bytes = plan.shape.row_bytes(),
                      .host_rows = plan.config.host_tokens,
                      .host_stride = plan.host_row_stride,
                      .index_block_bytes = plan.shape.index_block_bytes()});
  }
  free_all_slots();
}

void DeviceState::free_all_slots() const {
  const std::int32_t slots = views_.front().slots;
  std::vector<std::int32_t> stack(static_cast<std::size_t>(slots));
  std::iota(stack.rbegin(), stack.rend(), 0);
  for (const LayerBuffers& layer : buffers_) {
    backend_->copy_to_device(layer.free_slots.data(), stack.data(), layer.free_slots.bytes());
  }
  const std::vector<ReplacementState> replacement(views_.size(), {.hand = 0, .free = slots});
  backend_->copy_to_device(replacement_.data(), replacement.data(), replacement_.bytes());
}

void DeviceState::forget_residency() const {
  free_all_slots();
  for (const LayerBuffers& layer : buffers_) {
    for (const Buffer* map : {&layer.slot_of, &layer.host_of, &layer.stamp}) {
      backend_->fill(map->data(), kUnset, map->bytes());
    }
  }
}

void DeviceState::clear_kth_scores() const { backend_->fill(kth_score_.data(), kUnset, kth_score_.bytes()); }

void DeviceState::clear_prediction(std::int32_t session) const {
  for (float* values : {thresholds(), deviations()}) {
    backend_->fill(of_session(values, session), kUnset, views_.size() * sizeof(float));
  }
}

SessionPrediction DeviceState::read_prediction(std::int32_t session) const {
  const auto read = [&](float* values) {
    std::vector<float> own(views_.size());
    backend_->copy_to_host(own.data(), of_session(values, session), own.size() * sizeof(float));
    return own;
  };
  return {.thresholds = read(thresholds()), .deviations = read(deviations())};
}

void DeviceState::write_prediction(std::int32_t session, const SessionPrediction& values) const {
  const auto write = [&](float* to, const std::vector<float>& own) {
    backend_->copy_to_device(of_session(to, session), own.data(), own.size() * sizeof(float));
  };
  write(thresholds(), values.thresholds);
  write(deviations(), values.deviations);
}

std::vector<LayerStats> DeviceState::read_stats() const {
  std::vector<LayerCounters> counters(views_.size());
  std::vector<ReplacementState> replacement(views_.size());
  backend_->read_counters(counters.data(), counters_.data(), counters_.bytes());
  backend_->read_counters(replacement.data(), replacement_.data(), replacement_.bytes());
  std::vector<LayerStats> stats(views_.size());
  for (std::size_t i = 0; i < stats.size(); ++i) {
    stats[i] = {.hits = counters[i].hits,
                .misses = counters[i].misses,
                .evictions = counters[i].evictions,
                .appended = counters[i].appended,
                .lost_races = counters[i].lost_races,
                .recalled_bytes = counters[i].misses * views_[i].row_bytes,
                .candidates = counters[i].candidates,
                .full_selects = counters[i].full_selects,
                .prefetched = counters[i].prefetched,
                .prefetched_used = counters[i].prefetched_used,
                .prefetched_wasted = std::max<std::int64_t>(counters[i].prefetched - counters[i].prefetched_used, 0),
                .prefetches_capped = counters[i].prefetches_capped,
                .prefetched_bytes = counters[i].prefetched * views_[i].row_bytes,
                .forecast = counters[i].forecast,
                .forecast_used = counters[i].forecast_used,
                .forecast_wasted = std::max<std::int64_t>(counters[i].forecast - counters[i].forecast_used, 0),
                .forecast_bytes = counters[i].forecast * views_[i].row_bytes,
                // In the middle of a step more may have been asked of the stack than was there.
                .used_slots = views_[i].slots - std::max(replacement[i].free, 0)};
  }
  return stats;
}

CacheState DeviceState::read_layer(std::int32_t layer) const {
  const LayerView& view = this->layer(layer);
  const auto slots = static_cast<std::size_t>(view.slots);
  CacheState state;
  state.slot_of.resize(static_cast<std::size_t>(view.host_rows));
  state.host_of.resize(slots);
  state.stamp.resize(slots);
  state.slots.resize(slots * static_cast<std::size_t>(view.row_bytes));
  const auto read = [&](auto& out, const void* device) {
    backend_->copy_to_host(out.data(), device, out.size() * sizeof(out[0]));
  };
  read(state.slot_of, view.slot_of);
  std::ranges::replace_if(state.slot_of, [](std::int32_t slot) { return slot < 0; }, kNone);  // see residency.cuh
  read(state.host_of, view.host_of);
  read(state.stamp, view.stamp);
  read(state.slots, view.pool);
  return state;
}

}  // namespace echo
