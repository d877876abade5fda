// The part of StepCase that makes what its replays find: inputs, scores, and which rows are resident.

#include <algorithm>

#include "displace.hpp"
#include "echo/errors.hpp"
#include "require.hpp"
#include "rows.hpp"
#include "step_case.hpp"
#include "step_inputs.hpp"

namespace echo::bench {
namespace {

constexpr float kNewKeyDeviation = 1.6F;  ///< above that of other keys: what was just said is mostly selected

}  // namespace

void StepCase::fill_inputs() {
  host_.fill(sizes_.layers, sizes_.row_bytes, control_.host_rows(), context());
  if (sizes_.without_offload != 0) {
    launch_fill_slabs(rows_without_offload_.data(), sizes_.layers, sizes_.row_bytes, control_.host_rows(), context());
  }
  launch_fill_index_keys(layers_.device_views(), sizes_.layers, context());
  const auto normal = [&](const Buffer& buffer, std::uint32_t seed) {
    launch_fill_normal(buffer.data<std::uint16_t>(), static_cast<std::int64_t>(buffer.bytes() / 2), 1.0F, seed,
                       context());
  };
  normal(index_q_, 1);
  normal(q_, 2);
  launch_fill_weights(index_weights_.data<float>(), static_cast<std::int64_t>(index_weights_.bytes() / 4), 3,
                      context());
}

std::int32_t StepCase::position() const {
  return sizes_.new_rows == 0 ? sizes_.length - 1 : sizes_.length - kStepTokens + new_tokens_ - 1;
}

std::vector<Entry> StepCase::spread(std::int64_t misses, std::int64_t more) const {
  std::vector<Entry> entries(static_cast<std::size_t>(sizes_.batch));
  const auto share = [&](std::int64_t count, std::int64_t i) {
    return static_cast<std::int32_t>((i + 1) * count / sizes_.batch - i * count / sizes_.batch);
  };
  for (std::int64_t i = 0; i < sizes_.batch; ++i) {
    entries[static_cast<std::size_t>(i)] = {.position = position(), .hits = share(more, i), .misses = share(misses, i)};
  }
  return entries;
}

void StepCase::check_draw() const {
  std::int32_t failed = 0;
  backend_->copy_to_host(&failed, words_.data(), sizeof failed);
  if (failed != 0) {
    throw StateError("displace: a session has too few rows that are not resident");
  }
}

/// Draws what is displaced, and fetches what comes in.
void StepCase::displace_and_refill(std::int32_t misses, bool new_rows) {
  launch_displace({.layers = layers_.device_views(),
                   .layer_count = sizes_.layers,
                   .step = step(),
                   .new_rows = new_rows,
                   .whole = whole_pools(),
                   .seed = time_,
                   .misses_of = control_.misses_of(),
                   .missing_before = control_.missing_before(),
                   .more_of = control_.hits_of(),
                   .misses = misses,
                   .selection = expected_.data<std::int32_t>(),
                   .missing = missing_.data<std::int32_t>(),
                   .coming = coming_.data<std::int32_t>(),
                   .failed = words_.data<std::int32_t>()},
                  context());
  for (std::int32_t layer = 0; layer < sizes_.layers; ++layer) {
    RecallParams recall = recall_params(layer);
    recall.selection = coming_.data<std::int32_t>() + static_cast<std::int64_t>(layer) * entries();
    recall.slots = prepared_slots_.data<std::int32_t>();
    recall.scores = nullptr;
    recall.kth_score = nullptr;
    recall.kv = nullptr;
    backend_->recall(recall);
  }
  backend_->synchronize();
  check_draw();
  if (!whole_pools() && !forecasts() && layers_.free_slots() != 0 && time_ != 0) {
    throw StateError("displace: free slots are left");
  }
}

void StepCase::fill_pools() {
  const std::int64_t most = std::min<std::int64_t>(sizes_.pool_slots, control_.host_rows());
  for (std::int64_t left = most; left > 0; left -= entries()) {
    control_.upload(spread(0, std::min<std::int64_t>(left, entries())));
    backend_->begin({.step = step(), .host_blocks = control_.host_rows() / kTokensPerBlock});
    displace_and_refill(0, /*new_rows=*/false);
  }
}

std::int64_t StepCase::all_misses() const {
  std::int64_t sum = 0;
  for (const LayerCounters& layer : layers_.counters()) {
    sum += layer.misses;
  }
  return sum;
}

std::int64_t StepCase::prepare(std::int32_t misses) {
  const std::int64_t before = all_misses();
  ++time_;
  if (sizes_.new_rows != 0) {
    require(new_tokens_ < kStepTokens, "new_rows", new_tokens_ + 1, "at most " + std::to_string(kStepTokens));
    ++new_tokens_;
    host_.spoil();
  }
  const bool natural_ones = misses < 0;
  control_.upload(spread(natural_ones ? 0 : misses, 0));
  backend_->begin({.step = step(), .host_blocks = control_.host_rows() / kTokensPerBlock});
  launch_scale_keys({.layers = layers_.device_views(),
                     .layer_count = sizes_.layers,
                     .batch = sizes_.batch,
                     .session_rows = control_.rows_of(0).count,
                     .first_new = sizes_.new_rows != 0 ? sizes_.length - kStepTokens : sizes_.length,
                     .time = time_},
                    context());
  launch_fill_normal(index_key_.data<std::uint16_t>(), static_cast<std::int64_t>(index_key_.bytes() / 2),
                     kNewKeyDeviation, 0x1000U + time_, context());
  launch_fill_kv(kv_.data<std::uint16_t>(), sizes_.layers, shape_.latent_dim + shape_.rope_dim, step(), context());
  for (std::int32_t layer = 0; layer < sizes_.layers; ++layer) {
    std::int32_t* expected = expected_.data<std::int32_t>() + static_cast<std::int64_t>(layer) * entries();
    float* kth = prepared_kth_.data<float>() + static_cast<std::int64_t>(layer) * sizes_.batch;
    backend_->score(score_params(layer, {}));
    backend_->select(select_params(layer, {}, expected, kth));
    if (natural_ones) {
      continue;
    }
    RecallParams recall = recall_params(layer);
    recall.selection = expected;
    recall.slots = prepared_slots_.data<std::int32_t>();
    recall.kth_score = kth;
    recall.kv = nullptr;
    backend_->recall(recall);
  }
  if (natural_ones) {
    return 0;
  }
  const std::int64_t natural = all_misses() - before;
  control_.upload(spread(misses, 0));
  displace_and_refill(misses, sizes_.new_rows != 0);
  return natural;
}

}  // namespace echo::bench
