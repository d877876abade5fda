#include "echo/forward_pass.hpp"

#include <string>
#include <utility>

#include "echo/errors.hpp"
#include "runtime/pass_state.hpp"

namespace echo {

ForwardPass::ForwardPass(std::unique_ptr<State> state) : state_(std::move(state)) {}
ForwardPass::~ForwardPass() = default;

std::int32_t ForwardPass::rows() const { return state_->step.rows; }
std::int32_t ForwardPass::query_rows() const { return state_->step.query_rows; }
bool ForwardPass::is_prefill() const { return state_->prefill; }
Array ForwardPass::tokens() const { return {state_->step.tokens, DType::i32, {rows()}}; }
Array ForwardPass::positions() const { return {state_->step.positions, DType::i32, {rows()}}; }
const std::vector<RowBlock>& ForwardPass::blocks() const { return state_->blocks; }

// The step. One layer of it: what the paper's figure 5 shows.
void ForwardPass::attention(std::int32_t layer, const LayerInputs& in, const Array& out) {
  // All of them before anything is written, so that a forward can catch the error and try again.
  state_->require_layer(layer);
  state_->check_append(in.kv, in.index_key);
  const bool selects = static_cast<bool>(in.index_q);
  if (static_cast<bool>(in.index_key) != selects || static_cast<bool>(in.index_weights) != selects) {
    throw InvalidArgument("index_q: index_key, index_q and index_weights go together, or all are left out");
  }
  if (selects) {
    state_->check_score(in.index_q, in.index_weights);
  } else {
    state_->check_selected();
  }
  state_->check_attend(in.q, out);
  append(layer, in.kv, in.index_key);
  for (const RowBlock block : blocks()) {
    if (in.index_q) {
      score(layer, in.index_q, in.index_weights, block);
      select(layer, block);
    }
    recall(layer, block);
    attend(layer, in.q, in.scale, out, block);
  }
}

void ForwardPass::append(std::int32_t layer, const Array& kv, const Array& index_key) {
  State& s = *state_;
  s.require_layer(layer);
  if (s.appended[static_cast<std::size_t>(layer)]) {
    throw StateError("layer: " + std::to_string(layer) + " was appended to already in this pass");
  }
  s.check_append(kv, index_key);
  s.backend.append({.layer = s.device.layer(layer),
                    .step = s.step,
                    .shape = s.shape,
                    .kv = kv.data,
                    .kv_dtype = kv.dtype,
                    .index_key = index_key.data,
                    .index_key_dtype = index_key.dtype,
                    .to_slots = !s.prefill});
  s.appended[static_cast<std::size_t>(layer)] = true;
  s.keyed[static_cast<std::size_t>(layer)] = static_cast<bool>(index_key);
}

void ForwardPass::score(std::int32_t layer, const Array& index_q, const Array& index_weights, RowBlock block) {
  State& s = *state_;
  s.require_layer(layer);
  s.check_score(index_q, index_weights);
  const BlockView view = s.view_of(block);
  if (!s.appended[static_cast<std::size_t>(layer)]) {
    throw StateError("layer: " + std::to_string(layer) + " must be appended to before it is scored");
  }
  if (!s.keyed[static_cast<std::size_t>(layer)]) {
    throw StateError("index_key: layer " + std::to_string(layer) +
                     " was appended to without index keys and cannot be scored");
  }
  s.backend.score({.layer = s.device.layer(layer),
                   .step = s.step,
                   .block = view,
                   .shape = s.shape,
                   .index_q = index_q.data,
                   .index_q_dtype = index_q.dtype,
                   .index_weights = index_weights.as<const float>(),
                   .scores = s.device.scores(),
                   .score_stride = s.plan.config.max_context});
  s.scored_layer = layer;
  s.scored_block = view.tick_offset;
}

Array ForwardPass::select(std::int32_t layer, RowBlock block) {
  State& s = *state_;
  s.require_layer(layer);
  const BlockView view = s.view_of(block);
  if (s.scored_layer != layer || s.scored_block != view.tick_offset) {
    throw StateError("layer: the last score was not of layer " + std::to_string(layer) + " and this block");
  }
  s.backend.select({.step = s.step,
                    .block = view,
                    .shape = s.shape,
                    .scores = s.device.scores(),
                    .score_stride = s.plan.config.max_context,
                    .selection = s.device.selection(),
                    .kth_score = s.device.kth_score() + layer * s.plan.pass_rows});
  s.selected[static_cast<std::size_t>(view.tick_offset)] = true;
  const std::int64_t offset = static_cast<std::int64_t>(block.first) * s.shape.top_k;
  return {s.device.selection() + offset, DType::i32, {block.count, s.shape.top_k}};
}

Array ForwardPass::recall(std::int32_t layer, RowBlock block, const Array& selection) {
  State& s = *state_;
  s.require_layer(layer);
  const BlockView view = s.view_of(block);
  const std::int32_t* positions = s.device.selection() + static_cast<std::int64_t>(block.first) * s.shape.top_k;
  if (selection) {
    require_array("selection", selection, {DType::i32}, {block.count, s.shape.top_k});
    positions = selection.as<const std::int32_t>();
  } else if (!s.selected[static_cast<std::size_t>(view.tick_offset)]) {
    throw StateError("selection: nothing was selected for this block in this pass, and none is given");
  }
  if (!s.appended[static_cast<std::size_t>(layer)]) {
    throw StateError("layer: " + std::to_string(layer) + " must be appended to before rows are recalled");
  }
  s.backend.recall({.layer = s.device.layer(layer),
                    .step = s.step,
                    .block = view,
                    .shape = s.shape,
                    .selection = positions,
                    .slots = s.device.selected_slots()});
  s.recalled_layer = layer;
  s.recalled_block = view.tick_offset;
  return {s.device.selected_slots(), DType::i32, {block.count, s.shape.top_k}};
}

void ForwardPass::attend(std::int32_t layer, const Array& q, float scale, const Array& out, RowBlock block) {
  State& s = *state_;
  s.require_layer(layer);
  s.check_attend(q, out);
  const BlockView view = s.view_of(block);
  if (s.recalled_layer != layer || s.recalled_block != view.tick_offset) {
    throw StateError("layer: the last recall was not of layer " + std::to_string(layer) + " and this block");
  }
  s.backend.attend({.layer = s.device.layer(layer),
                    .block = view,
                    .shape = s.shape,
                    .q = q.data,
                    .q_dtype = q.dtype,
                    .scale = scale,
                    .slots = s.device.selected_slots(),
                    .out = out.data,
                    .out_dtype = out.dtype,
                    .splits = static_cast<std::int32_t>(s.plan.config.attention_splits)});
}

std::shared_ptr<const void> ForwardPass::keep_alive() const { return state_->memory; }

Array ForwardPass::selection() const { return {state_->device.selection(), DType::i32, {rows(), state_->shape.top_k}}; }

}  // namespace echo
