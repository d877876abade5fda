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
  state_->check_attend(in.q, in.scale, out);
  state_->require_not_appended(layer);
  // While decoding, score and recall append what they need of the new tokens: that saves a launch.
  const bool in_passing = !is_prefill();
  const Array kv = in_passing ? in.kv : Array{};
  const Array key = in_passing ? in.index_key : Array{};
  const UnbrokenVerbs unbroken(state_->backend);
  if (!in_passing) {
    state_->append(layer, in.kv, in.index_key);
  }
  for (const RowBlock rows : blocks()) {
    const BlockView block = state_->view_of(rows);
    if (selects) {
      state_->score(layer, in.index_q, in.index_weights, block, key);
      state_->select(layer, block);
    }
    state_->recall(layer, block, state_->selection_of(block), kv);
    state_->attend(layer, in.q, in.scale, out, block);
  }
}

void ForwardPass::append(std::int32_t layer, const Array& kv, const Array& index_key) {
  State& s = *state_;
  s.require_layer(layer);
  s.require_not_appended(layer);
  s.check_append(kv, index_key);
  s.append(layer, kv, index_key);
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
  s.score(layer, index_q, index_weights, view, {});
}

Array ForwardPass::scores(RowBlock block) const {
  State& s = *state_;
  s.require_active();
  if (s.scored_block != s.view_of(block).tick_offset) {
    throw StateError("block: the last score was not of rows " + std::to_string(block.first) + " + " +
                     std::to_string(block.count));
  }
  s.sifted = false;  // what was listed while scoring would not be what is in the array
  return {s.device.scores(), DType::f32, {block.count, s.plan.config.max_context}};
}

Array ForwardPass::select(std::int32_t layer, RowBlock block) {
  State& s = *state_;
  s.require_layer(layer);
  const BlockView view = s.view_of(block);
  if (s.scored_layer != layer || s.scored_block != view.tick_offset) {
    throw StateError("layer: the last score was not of layer " + std::to_string(layer) + " and this block");
  }
  s.select(layer, view);
  return {s.selection_of(view), DType::i32, {block.count, s.shape.top_k}};
}

Array ForwardPass::recall(std::int32_t layer, RowBlock block, const Array& selection) {
  State& s = *state_;
  s.require_layer(layer);
  const BlockView view = s.view_of(block);
  const std::int32_t* positions = s.selection_of(view);
  if (selection) {
    require_array("selection", selection, {DType::i32}, {block.count, s.shape.top_k});
    positions = selection.as<const std::int32_t>();
  } else if (!s.selected[static_cast<std::size_t>(view.tick_offset)]) {
    throw StateError("selection: nothing was selected for this block in this pass, and none is given");
  }
  if (!s.appended[static_cast<std::size_t>(layer)]) {
    throw StateError("layer: " + std::to_string(layer) + " must be appended to before rows are recalled");
  }
  s.recall(layer, view, positions, {});
  return {s.device.selected_slots(), DType::i32, {block.count, s.shape.top_k}};
}

void ForwardPass::attend(std::int32_t layer, const Array& q, float scale, const Array& out, RowBlock block) {
  State& s = *state_;
  s.require_layer(layer);
  s.check_attend(q, scale, out);
  const BlockView view = s.view_of(block);
  if (s.recalled_layer != layer || s.recalled_block != view.tick_offset) {
    throw StateError("layer: the last recall was not of layer " + std::to_string(layer) + " and this block");
  }
  s.attend(layer, q, scale, out, view);
}

std::shared_ptr<const void> ForwardPass::keep_alive() const { return state_->memory; }

Array ForwardPass::selection() const { return {state_->device.selection(), DType::i32, {rows(), state_->shape.top_k}}; }

}  // namespace echo
