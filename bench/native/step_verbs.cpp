// The part of StepCase that calls verbs, as RuntimeImpl and ForwardPass do it.

#include "rows.hpp"
#include "step_case.hpp"

namespace echo::bench {
namespace {

constexpr float kScale = 0.07F;  ///< of attention

}  // namespace

const std::uint16_t* StepCase::kv_of(std::int32_t layer) const {
  const std::int64_t size = static_cast<std::int64_t>(sizes_.batch) * (shape_.latent_dim + shape_.rope_dim);
  return sizes_.new_rows == 0 ? nullptr : kv_.data<std::uint16_t>() + layer * size;
}

LayerView StepCase::view_without_offload(std::int32_t layer) const {
  LayerView view = this->view(layer);
  view.slab = rows_without_offload_.data() + layer * view.host_rows * view.host_stride;
  view.pool = view.slab;
  view.slots = static_cast<std::int32_t>(view.host_rows);
  return view;
}

ScoreParams StepCase::score_params(std::int32_t layer, const SiftView& sift) const {
  const std::int64_t heads = static_cast<std::int64_t>(layer) * sizes_.batch * shape_.index_heads;
  return {.layer = view(layer),
          .step = step(),
          .block = block(),
          .shape = shape_,
          .index_q = index_q_.data<std::uint16_t>() + heads * shape_.index_dim,
          .index_q_dtype = DType::bf16,
          .index_weights = index_weights_.data<float>() + heads,
          .scores = scores_.data<float>(),
          .score_stride = control_.score_stride(),
          .sift = sift,
          .index_key = sizes_.new_rows == 0 ? nullptr
                                            : index_key_.data<std::uint16_t>() +
                                                  static_cast<std::int64_t>(layer) * sizes_.batch * shape_.index_dim,
          .index_key_dtype = DType::bf16};
}

SelectParams StepCase::select_params(std::int32_t layer, const SiftView& sift, std::int32_t* selection,
                                     float* kth) const {
  return {.step = step(),
          .block = block(),
          .shape = shape_,
          .scores = scores_.data<float>(),
          .score_stride = control_.score_stride(),
          .selection = selection,
          .kth_score = kth,
          .sift = sift,
          .counters = view(layer).counters};
}

RecallParams StepCase::recall_params(std::int32_t layer) const {
  const std::int64_t first = static_cast<std::int64_t>(layer) * entries();
  return {.layer = view(layer),
          .step = step(),
          .block = block(),
          .shape = shape_,
          .selection = selection_.data<std::int32_t>() + first,
          .slots = slots_.data<std::int32_t>() + first,
          .scores = scores_.data<float>(),
          .score_stride = control_.score_stride(),
          .kth_score = kth_score_.data<float>() + static_cast<std::int64_t>(layer) * sizes_.batch,
          .kv = kv_of(layer),
          .kv_dtype = DType::bf16};
}

ForecastParams StepCase::forecast_params(std::int32_t layer) const {
  const RecallParams recall = recall_params(layer);
  return {.layer = recall.layer,
          .step = recall.step,
          .block = recall.block,
          .shape = recall.shape,
          .index = layer,
          .scores = recall.scores,
          .score_stride = recall.score_stride,
          .kth_score = recall.kth_score,
          .cap = sizes_.forecast_cap};
}

AttendParams StepCase::attend_params(std::int32_t layer) const {
  const std::int64_t heads = static_cast<std::int64_t>(layer) * sizes_.batch * shape_.query_heads;
  return {.layer = view(layer),
          .block = block(),
          .shape = shape_,
          .q = q_.data<std::uint16_t>() + heads * (shape_.latent_dim + shape_.rope_dim),
          .q_dtype = DType::bf16,
          .scale = kScale,
          .slots = slots_.data<std::int32_t>() + static_cast<std::int64_t>(layer) * entries(),
          .out = out_.data<std::uint16_t>() + heads * shape_.latent_dim,
          .out_dtype = DType::bf16,
          .splits = splits_};
}

SiftView StepCase::sift_view(std::int32_t layer, const EchoStepReplay& what) const {
  if (!sifts(what)) {
    return {};
  }
  const std::int32_t turn = layer % 2;
  const std::int32_t next = 1 - turn;
  return {.rows = sift_rows_.data<RowSift>() + turn * sizes_.batch,
          .next_rows = sift_rows_.data<RowSift>() + next * sizes_.batch,
          .tokens = sift_tokens_.data<ScoredToken>(),
          .capacity = static_cast<std::int32_t>(sift_tokens_.bytes() / sizeof(ScoredToken)) / sizes_.batch,
          .thresholds = thresholds_.data<float>() + layer,
          .deviations = deviations_.data<float>() + layer,
          .predicted_stride = sizes_.layers,
          .prefetched = prefetched_.data<std::int32_t>() + turn,
          .next_prefetched = prefetched_.data<std::int32_t>() + next,
          .prefetch_cap = what.prefetch_cap};
}

void StepCase::call(const EchoStepReplay& what, std::int32_t layer) {
  const auto part = static_cast<StepPart>(what.part);
  if (part == StepPart::gather) {
    launch_gather({.slab = view(layer).slab,
                   .host_stride = view(layer).host_stride,
                   .row_bytes = view(layer).row_bytes,
                   .rows = missing_.data<std::int32_t>() + static_cast<std::int64_t>(layer) * what.misses,
                   .count = what.misses,
                   .target = gathered_.data()},
                  what.blocks, context());
    return;
  }
  const UnbrokenVerbs unbroken(*backend_);  // of a layer, as in ForwardPass::attention
  const bool offloads = part != StepPart::without_offload;
  if (part == StepPart::nothing) {
    return;
  }
  if (sizes_.new_rows != 0 && !offloads) {  // with offload, recall writes them
    backend_->append({.layer = view_without_offload(layer),
                      .step = step(),
                      .shape = shape_,
                      .kv = kv_of(layer),
                      .kv_dtype = DType::bf16,
                      .index_key = nullptr,
                      .index_key_dtype = DType::bf16});
  }
  const SiftView sift = sift_view(layer, what);
  backend_->score(score_params(layer, sift));
  if (part == StepPart::score) {
    return;
  }
  const RecallParams recall = recall_params(layer);
  std::int32_t* selection = selection_.data<std::int32_t>() + static_cast<std::int64_t>(layer) * entries();
  float* kth = kth_score_.data<float>() + static_cast<std::int64_t>(layer) * sizes_.batch;
  backend_->select(select_params(layer, sift, selection, kth));
  if (part == StepPart::select) {
    return;
  }
  if (offloads) {
    backend_->recall(recall);
    if (forecasts()) {
      backend_->forecast(forecast_params(layer));
    }
  }
  if (part == StepPart::recall) {
    return;
  }
  AttendParams attend = attend_params(layer);
  if (!offloads) {
    attend.layer = view_without_offload(layer);
    attend.slots = selection;
  }
  backend_->attend(attend);
}

}  // namespace echo::bench
