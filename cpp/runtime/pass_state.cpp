#include "runtime/pass_state.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "echo/errors.hpp"
#include "runtime/verb_range.hpp"

namespace echo {

void require_array(const char* name, const Array& array, std::initializer_list<DType> types,
                   std::initializer_list<std::int64_t> shape) {
  bool right = array.dims == static_cast<int>(shape.size()) && (array.data != nullptr || array.elements() == 0);
  for (std::size_t i = 0; right && i < shape.size(); ++i) {
    right = array.shape[i] == shape.begin()[i];
  }
  bool known_type = false;
  std::string expected;
  for (DType type : types) {
    known_type = known_type || array.dtype == type;
    expected += (expected.empty() ? "" : " or ") + to_string(type);
  }
  if (!right || !known_type) {
    std::string extents;
    for (std::int64_t extent : shape) {
      extents += (extents.empty() ? "" : ", ") + std::to_string(extent);
    }
    throw InvalidArgument(std::string(name) + ": " + to_string(array) + " given, expected " + expected + " [" +
                          extents + "]");
  }
  require_aligned(name, array, size_of(array.dtype));
}

void require_aligned(const char* name, const Array& array, std::size_t alignment) {
  const auto address = reinterpret_cast<std::uintptr_t>(array.data);
  if (address % alignment != 0) {
    throw InvalidArgument(std::string(name) + ": address " + std::to_string(address) +
                          " given, expected a multiple of " + std::to_string(alignment));
  }
}

ForwardPass::State::State(Backend& backend_, std::shared_ptr<const DeviceState> device_, const Plan& plan_,
                          const StepView& step_, bool prefill_)
    : backend(backend_),
      memory(std::move(device_)),
      device(*memory),
      plan(plan_),
      step(step_),
      shape(shape_view(plan_.shape)),
      prefill(prefill_) {
  const auto most = static_cast<std::int32_t>(plan.block_rows);
  for (std::int32_t first = 0; first < step.rows; first += most) {
    blocks.push_back({.first = first, .count = std::min(most, step.rows - first)});
  }
}

void ForwardPass::State::begin() {
  const VerbRange range("begin");
  sifting = plan.sift_capacity > 0 && !prefill && backend.sifts();
  sifted = odd = false;
  backend.begin({.step = step,
                 .host_blocks = plan.host_blocks,
                 .layers = prefill ? std::span<const LayerView>() : std::span(device.layers()),
                 .sift_rows = sifting ? device.sift_rows(false) : nullptr,
                 .prefetched = sifting ? device.prefetched(false) : nullptr});
  active = true;
  appended.assign(static_cast<std::size_t>(layers()), false);
  keyed.assign(static_cast<std::size_t>(layers()), false);
  selected.assign(blocks.size(), false);
  scored_layer = scored_block = recalled_layer = recalled_block = kNone;
  ranked = false;
}

void ForwardPass::State::finish() {
  for (std::int32_t layer = 0; layer < layers(); ++layer) {
    if (!appended[static_cast<std::size_t>(layer)]) {
      throw StateError("forward: layer " + std::to_string(layer) + " of " + std::to_string(layers()) +
                       " was not appended to");
    }
  }
  const VerbRange range("commit");
  backend.commit({.step = step,
                  .layers = layers(),
                  .kth_score = device.kth_score(),
                  .kth_stride = plan.pass_rows,
                  .thresholds = device.thresholds(),
                  .deviations = device.deviations(),
                  .alpha = static_cast<float>(plan.config.threshold_alpha)});
  active = false;
}

void ForwardPass::State::require_active() const {
  if (!active) {
    throw StateError("pass: a ForwardPass can only be used by the forward it was given to, while it runs");
  }
}

void ForwardPass::State::require_layer(std::int32_t layer) const {
  require_active();
  if (layer < 0 || layer >= layers()) {
    throw InvalidArgument("layer: " + std::to_string(layer) + " given, expected 0 to " + std::to_string(layers() - 1));
  }
}

std::int32_t ForwardPass::State::index_of(RowBlock block) const {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].first == block.first && blocks[i].count == block.count) {
      return static_cast<std::int32_t>(i);
    }
  }
  throw InvalidArgument("block: rows " + std::to_string(block.first) + " + " + std::to_string(block.count) +
                        " given, expected one of the pass's " + std::to_string(blocks.size()) + " blocks");
}

BlockView ForwardPass::State::view_of(RowBlock block) const {
  return {.first = block.first, .count = block.count, .tick_offset = index_of(block)};
}

void ForwardPass::State::check_append(const Array& kv, const Array& index_key) const {
  if (kv.dtype == DType::u8 || shape.row_format == RowFormat::raw) {
    require_array("kv", kv, {DType::u8}, {step.rows, plan.shape.row_bytes()});
    require_aligned("kv", kv, backend.row_alignment());
  } else {
    require_array("kv", kv, {DType::f32, DType::bf16}, {step.rows, plan.shape.row_dim()});
  }
  if (index_key) {
    require_array("index_key", index_key, {DType::f32, DType::bf16}, {step.rows, shape.index_dim});
  }
}

void ForwardPass::State::check_score(const Array& index_q, const Array& index_weights) const {
  require_array("index_q", index_q, {DType::f32, DType::bf16}, {step.rows, shape.index_heads, shape.index_dim});
  require_array("index_weights", index_weights, {DType::f32}, {step.rows, shape.index_heads});
  require_aligned("index_q", index_q, backend.score_alignment());
}

void ForwardPass::State::check_selected() const {
  if (std::find(selected.begin(), selected.end(), false) != selected.end()) {
    throw StateError("index_q: left out, but no layer before has selected anything in this pass");
  }
}

void ForwardPass::State::check_attend(const Array& q, float scale, const Array& out) const {
  if (shape.row_format == RowFormat::raw) {
    throw NotSupported("row_format: raw rows have no known layout; attend to recall's slots with a kernel of yours");
  }
  require_array("q", q, {DType::f32, DType::bf16}, {step.rows, shape.query_heads, plan.shape.row_dim()});
  require_array("out", out, {DType::f32, DType::bf16}, {step.rows, shape.query_heads, shape.latent_dim});
  require_aligned("q", q, backend.attend_alignment());
  require_aligned("out", out, backend.attend_alignment());
  constexpr float kLog2OfE = 1.44269504F;  // kernels take weights as powers of two
  if (!std::isfinite(scale * kLog2OfE)) {
    throw InvalidArgument("scale: " + std::to_string(scale) + " given, expected a finite number below 2.3e38");
  }
}

void ForwardPass::State::require_not_appended(std::int32_t layer) const {
  if (appended[static_cast<std::size_t>(layer)]) {
    throw StateError("layer: " + std::to_string(layer) + " was appended to already in this pass");
  }
}

}  // namespace echo
