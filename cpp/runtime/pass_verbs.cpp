// What the verbs of a pass tell the backend, and what they leave to remember.

#include <utility>

#include "runtime/pass_state.hpp"
#include "runtime/verb_range.hpp"

namespace echo {

void ForwardPass::State::append(std::int32_t layer, const Array& kv, const Array& index_key) {
  const VerbRange range("append", layer);
  if (kv || index_key) {
    backend.append({.layer = device.layer(layer),
                    .step = step,
                    .shape = shape,
                    .kv = kv.data,
                    .kv_dtype = kv.dtype,
                    .index_key = index_key.data,
                    .index_key_dtype = index_key.dtype});
  }
  appended[static_cast<std::size_t>(layer)] = static_cast<bool>(kv);
  keyed[static_cast<std::size_t>(layer)] = static_cast<bool>(index_key);
}

void ForwardPass::State::score(std::int32_t layer, const Array& index_q, const Array& index_weights,
                               const BlockView& block, const Array& index_key) {
  const VerbRange range("score", layer);
  // A call that throws may have sifted half of its rows, and not zeroed those of the next: no call sifts after it.
  const bool sift = std::exchange(sifting, false);
  sifted = false;
  backend.score({.layer = device.layer(layer),
                 .step = step,
                 .block = block,
                 .shape = shape,
                 .index_q = index_q.data,
                 .index_q_dtype = index_q.dtype,
                 .index_weights = index_weights.as<const float>(),
                 .scores = device.scores(),
                 .score_stride = plan.config.max_context,
                 .sift = sift ? sift_of(layer, odd) : SiftView{},
                 .index_key = index_key.data,
                 .index_key_dtype = index_key.dtype});
  if (index_key) {
    keyed[static_cast<std::size_t>(layer)] = true;
  }
  sifting = sifted = sift;
  odd = odd != sift;
  scored_layer = layer;
  scored_block = block.tick_offset;
  ranked = false;
}

SiftView ForwardPass::State::sift_of(std::int32_t layer, bool odd_call) const {
  return {.rows = device.sift_rows(odd_call),
          .next_rows = device.sift_rows(!odd_call),
          .tokens = device.candidates(),
          .capacity = static_cast<std::int32_t>(plan.sift_capacity),
          .thresholds = device.thresholds() + layer,
          .deviations = device.deviations() + layer,
          .predicted_stride = layers(),
          .prefetched = device.prefetched(odd_call),
          .next_prefetched = device.prefetched(!odd_call),
          .prefetch_cap = static_cast<float>(plan.config.prefetch_cap / 1000.0)};
}

void ForwardPass::State::select(std::int32_t layer, const BlockView& block) {
  const VerbRange range("select", layer);
  backend.select({.step = step,
                  .block = block,
                  .shape = shape,
                  .scores = device.scores(),
                  .score_stride = plan.config.max_context,
                  .selection = device.selection(),
                  .kth_score = device.kth_score() + layer * plan.pass_rows,
                  .sift = sifted ? sift_of(layer, !odd) : SiftView{},
                  .counters = device.layer(layer).counters});
  selected[static_cast<std::size_t>(block.tick_offset)] = true;
  ranked = true;
}

void ForwardPass::State::recall(std::int32_t layer, const BlockView& block, const std::int32_t* positions,
                                const Array& kv) {
  const VerbRange range("recall", layer);
  // Scores of another layer, of other rows, or of another selection say nothing about these rows.
  const bool scored = ranked && scored_layer == layer && scored_block == block.tick_offset;
  const bool own = scored && positions == selection_of(block);
  backend.recall({.layer = device.layer(layer),
                  .step = step,
                  .block = block,
                  .shape = shape,
                  .selection = positions,
                  .slots = device.selected_slots(),
                  .scores = own ? device.scores() : nullptr,
                  .score_stride = plan.config.max_context,
                  .kth_score = own ? device.kth_score() + layer * plan.pass_rows : nullptr,
                  .kv = kv.data,
                  .kv_dtype = kv.dtype});
  if (kv) {
    appended[static_cast<std::size_t>(layer)] = true;
  }
  recalled_layer = layer;
  recalled_block = block.tick_offset;
  if (own && !prefill && plan.config.forecast_cap > 0 && backend.forecasts()) {
    forecast(layer, block);
  }
}

void ForwardPass::State::forecast(std::int32_t layer, const BlockView& block) {
  const VerbRange range("forecast", layer);
  backend.forecast({.layer = device.layer(layer),
                    .step = step,
                    .block = block,
                    .shape = shape,
                    .index = layer,
                    .scores = device.scores(),
                    .score_stride = plan.config.max_context,
                    .kth_score = device.kth_score() + layer * plan.pass_rows,
                    .cap = static_cast<std::int32_t>(plan.config.forecast_cap)});
}

void ForwardPass::State::attend(std::int32_t layer, const Array& q, float scale, const Array& out,
                                const BlockView& block) {
  const VerbRange range("attend", layer);
  backend.attend({.layer = device.layer(layer),
                  .block = block,
                  .shape = shape,
                  .q = q.data,
                  .q_dtype = q.dtype,
                  .scale = scale,
                  .slots = device.selected_slots(),
                  .out = out.data,
                  .out_dtype = out.dtype,
                  .splits = static_cast<std::int32_t>(plan.config.attention_splits)});
}

}  // namespace echo
