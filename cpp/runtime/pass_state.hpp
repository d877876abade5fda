#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "echo/forward_pass.hpp"
#include "echo/planner.hpp"
#include "kernels/params.hpp"
#include "runtime/backend.hpp"
#include "runtime/device_state.hpp"

namespace echo {

/// Throws InvalidArgument naming `name` unless the array is of one of the types and of this shape, and lies where
/// elements of its type may.
void require_array(const char* name, const Array& array, std::initializer_list<DType> types,
                   std::initializer_list<std::int64_t> shape);
/// Throws InvalidArgument naming `name` unless the array's address is a multiple of `alignment`.
void require_aligned(const char* name, const Array& array, std::size_t alignment);

/// What a ForwardPass works on, and how far it has come. The references outlive it.
struct ForwardPass::State {
  State(Backend& backend_, std::shared_ptr<const DeviceState> device_, const Plan& plan_, const StepView& step_,
        bool prefill_);

  Backend& backend;
  std::shared_ptr<const DeviceState> memory;  ///< arrays that verbs return stay alive with it
  const DeviceState& device;
  const Plan& plan;
  StepView step;
  ShapeView shape;
  bool prefill;
  std::vector<RowBlock> blocks;

  bool active = false;         ///< between begin() and finish(): verbs may be called
  std::vector<bool> appended;  ///< [layers] rows were
  std::vector<bool> keyed;     ///< [layers] index keys were
  std::vector<bool> selected;  ///< [blocks] the selection buffer holds this block's selection
  std::int32_t scored_layer = kNone;
  std::int32_t scored_block = kNone;
  bool ranked = false;   ///< the last score was selected from
  bool sifting = false;  ///< scores of this pass sift
  bool sifted = false;   ///< the last score did, and nobody else could change what it scored
  bool odd = false;      ///< an odd number of scores sifted in this pass
  std::int32_t recalled_layer = kNone;
  std::int32_t recalled_block = kNone;

  void begin();
  /// Checks that the model went through all layers and folds the k-th scores into what is predicted.
  void finish();

  std::int32_t layers() const { return plan.shape.layers; }
  void require_active() const;
  void require_layer(std::int32_t layer) const;
  /// Index of a block of `blocks`; InvalidArgument naming `block` if it is none.
  std::int32_t index_of(RowBlock block) const;
  BlockView view_of(RowBlock block) const;

  // InvalidArgument naming the array unless it is what the verbs take.
  void check_append(const Array& kv, const Array& index_key) const;
  void check_score(const Array& index_q, const Array& index_weights) const;
  void check_selected() const;
  void check_attend(const Array& q, float scale, const Array& out) const;
  void require_not_appended(std::int32_t layer) const;

  // The verbs, once all is checked. An absent kv or index_key is not appended.
  void append(std::int32_t layer, const Array& kv, const Array& index_key);
  /// With `index_key`, which takes the whole pass in one block, appends it first.
  void score(std::int32_t layer, const Array& index_q, const Array& index_weights, const BlockView& block,
             const Array& index_key);
  void select(std::int32_t layer, const BlockView& block);
  /// With `kv`, which takes the whole pass in one block, appends it too.
  void recall(std::int32_t layer, const BlockView& block, const std::int32_t* positions, const Array& kv);
  /// Behind a recall of what this layer selected.
  void forecast(std::int32_t layer, const BlockView& block);
  void attend(std::int32_t layer, const Array& q, float scale, const Array& out, const BlockView& block);

  /// What score `odd` of a pass sifts into.
  SiftView sift_of(std::int32_t layer, bool odd_call) const;

  /// The place of a block's first row in the selections of the pass.
  std::int32_t* selection_of(const BlockView& block) const {
    return device.selection() + static_cast<std::int64_t>(block.first) * shape.top_k;
  }
};

}  // namespace echo
