#include "step_case.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "cache_manager/replacement.hpp"
#include "echo/errors.hpp"
#include "echo/runtime_config.hpp"
#include "require.hpp"
#include "rows.hpp"
#include "runtime/attention_splits.hpp"
#include "runtime/backends.hpp"
#include "step_inputs.hpp"

namespace echo::bench {
namespace {

constexpr std::size_t kOtherBytes = std::size_t{1} << 30;  ///< many L2 caches
constexpr float kAlpha = 0.5F;                             ///< of the thresholds
constexpr std::int32_t kSiftCapacity = 3 * kTopK;          ///< as planned for a runtime

EchoStepCase checked(const EchoStepCase& sizes) {
  require(sizes.layers > 0 && sizes.layers <= kLayers, "layers", sizes.layers, "1 to " + std::to_string(kLayers));
  require(sizes.batch > 0, "batch", sizes.batch, "at least 1");
  require(sizes.row_bytes == 656 || sizes.row_bytes == 1152, "row_bytes", sizes.row_bytes, "656 or 1152");
  require(sizes.length > kTopK + kStepTokens && sizes.length <= kMostTokens, "length", sizes.length,
          "up to " + std::to_string(kMostTokens) + " tokens, and more than a selection");
  require(sizes.pool_slots > sizes.batch * (kTopK + 1), "pool_slots", sizes.pool_slots,
          "more than the sessions select");
  require(sizes.without_offload == 0 || sizes.batch == 1, "without_offload", sizes.without_offload,
          "0, or one session: its positions are the places of its rows");
  return sizes;
}

ShapeView shape_of(const EchoStepCase& sizes) {
  const RowFormat format = sizes.row_bytes == 656 ? RowFormat::fp8_656 : RowFormat::bf16_1152;
  return shape_view(ModelShape::deepseek_v32(format));
}

RuntimeConfig own_kernels() {
  RuntimeConfig config;
  config.kernels = "auto";
  return config;
}

std::int64_t index_block_bytes() { return ModelShape::deepseek_v32().index_block_bytes(); }

}  // namespace

StepCase::StepCase(const EchoStepCase& sizes, HostRows& host)
    : sizes_(checked(sizes)),
      host_(host),
      backend_(make_cuda_backend(0, own_kernels())),
      shape_(shape_of(sizes)),
      control_(*backend_, std::vector<std::int32_t>(static_cast<std::size_t>(sizes.batch), sizes.length)),
      layers_(*backend_,
              {.layers = sizes.layers,
               .slots = sizes.pool_slots,
               .row_bytes = sizes.row_bytes,
               .host_rows = control_.host_rows(),
               .index_block_bytes = index_block_bytes()},
              host.device()),
      splits_(sizes.splits != 0
                  ? sizes.splits
                  : static_cast<std::int32_t>(chosen_attention_splits(ModelShape::deepseek_v32(), sizes.batch))) {
  backend_->use_stream(reinterpret_cast<std::uintptr_t>(stream_.get()));
  const auto most_slots = std::max<std::int64_t>(sizes_.pool_slots, control_.host_rows());
  backend_->prepare({.shape = shape_,
                     .layers = sizes_.layers,
                     .rows = sizes_.batch,
                     .block_rows = sizes_.batch,
                     .slots = static_cast<std::int32_t>(most_slots),
                     .host_rows = control_.host_rows(),
                     .splits = splits_,
                     .entries = sizes_.batch,
                     .forecast_cap = sizes_.forecast_cap});
  const auto allocate = [&](std::int64_t count, std::size_t size, const char* name) {
    Buffer buffer(backend_->device_memory(), static_cast<std::size_t>(count) * size, name);
    backend_->fill(buffer.data(), 0xFF, buffer.bytes());
    return buffer;
  };
  const std::int64_t rows = static_cast<std::int64_t>(sizes_.layers) * sizes_.batch;  // of all layers
  selection_ = allocate(rows * kTopK, sizeof(std::int32_t), "selection");
  expected_ = allocate(rows * kTopK, sizeof(std::int32_t), "expected selection");
  slots_ = allocate(rows * kTopK, sizeof(std::int32_t), "selected slots");
  coming_ = allocate(rows * kTopK, sizeof(std::int32_t), "rows that come in");
  missing_ = allocate(rows * kTopK, sizeof(std::int32_t), "missing rows");
  prepared_slots_ = allocate(entries(), sizeof(std::int32_t), "selected slots");
  scores_ = allocate(sizes_.batch * control_.score_stride(), sizeof(float), "scores");
  kth_score_ = allocate(rows, sizeof(float), "k-th scores");
  prepared_kth_ = allocate(rows, sizeof(float), "k-th scores");
  thresholds_ = allocate(rows, sizeof(float), "thresholds");
  deviations_ = allocate(rows, sizeof(float), "deviations");
  index_key_ = allocate(rows * shape_.index_dim, sizeof(std::uint16_t), "new index keys");
  index_q_ = allocate(rows * shape_.index_heads * shape_.index_dim, sizeof(std::uint16_t), "index queries");
  index_weights_ = allocate(rows * shape_.index_heads, sizeof(float), "index weights");
  kv_ = allocate(rows * (shape_.latent_dim + shape_.rope_dim), sizeof(std::uint16_t), "kv");
  q_ = allocate(rows * shape_.query_heads * (shape_.latent_dim + shape_.rope_dim), sizeof(std::uint16_t), "queries");
  out_ = allocate(rows * shape_.query_heads * shape_.latent_dim, sizeof(std::uint16_t), "outputs");
  sift_rows_ = allocate(2 * std::int64_t{sizes_.batch}, sizeof(RowSift), "sift");
  sift_tokens_ = allocate(sizes_.batch * std::int64_t{kSiftCapacity}, sizeof(ScoredToken), "candidates");
  prefetched_ = allocate(2, sizeof(std::int32_t), "prefetched");
  gathered_ = allocate(entries(), static_cast<std::size_t>(sizes_.row_bytes), "gathered rows");
  other_data_ = allocate(kOtherBytes, 1, "other data");
  words_ = allocate(2, sizeof(std::int32_t), "result of the draw");
  backend_->fill(other_data_.data(), 0, other_data_.bytes());
  backend_->fill(words_.data(), 0, words_.bytes());
  if (sizes_.without_offload != 0) {
    rows_without_offload_ = allocate(sizes_.layers * control_.host_rows(), static_cast<std::size_t>(sizes_.row_bytes),
                                     "rows without offload");
  }
  backend_->release(layers_.views(), {});  // all layers are known to the backend before a graph is captured
  fill_inputs();
  fill_pools();
}

StepCase::~StepCase() { backend_->retire(); }

TimedGraph& StepCase::graph(const EchoStepReplay& what) {
  const auto part = static_cast<StepPart>(what.part);
  require(part >= StepPart::nothing && part <= StepPart::gather, "part", what.part, "one of StepPart");
  require(what.misses >= -1 && what.misses <= sizes_.batch * (kTopK - sizes_.new_rows), "misses", what.misses,
          "at most what is selected");
  require(what.misses <= 0 || !whole_pools(), "misses", what.misses, "none where the pools hold all rows");
  require(part != StepPart::without_offload || sizes_.without_offload != 0, "part", what.part,
          "one with offload, as the case has it");
  require(part != StepPart::gather || (what.blocks > 0 && what.misses > 0), "blocks", what.blocks,
          "at least 1, and misses to gather");
  require(what.prefetch_cap == 0.0F || what.sift != 0, "sift", what.sift, "1 where rows are prefetched");
  const bool gathers = part == StepPart::gather;  // its lists are as long as there are misses
  const GraphKey key{part, gathers ? what.misses : what.sift, what.prefetch_cap, what.blocks};
  std::unique_ptr<TimedGraph>& captured = graphs_[key];
  if (captured == nullptr) {
    captured = std::make_unique<TimedGraph>(stream_.get(), [&] {
      if (!gathers) {
        backend_->begin({.step = step(),
                         .host_blocks = control_.host_rows() / kTokensPerBlock,
                         .layers = claims(what) ? layers_.views() : std::span<const LayerView>(),
                         .sift_rows = sifts(what) ? sift_rows_.data<RowSift>() : nullptr,
                         .prefetched = sifts(what) ? prefetched_.data<std::int32_t>() : nullptr});
      }
      for (std::int32_t layer = 0; layer < sizes_.layers; ++layer) {
        call(what, layer);
      }
      if (!gathers) {
        backend_->commit({.step = step(),
                          .layers = sizes_.layers,
                          .kth_score = kth_score_.data<float>(),
                          .kth_stride = sizes_.batch,
                          .thresholds = thresholds_.data<float>(),
                          .deviations = deviations_.data<float>(),
                          .alpha = kAlpha});
      }
    });
  }
  return *captured;
}

EchoStepResult StepCase::replay(const EchoStepReplay& what) {
  TimedGraph& timed = graph(what);
  const std::int64_t natural = prepare(what.misses);
  const std::vector<LayerCounters> before = layers_.counters();
  last_ = static_cast<StepPart>(what.part);
  for (const Buffer* buffer : {&selection_, &slots_, &scores_, &out_}) {
    backend_->fill(buffer->data(), 0xFF, buffer->bytes());  // what is found there afterwards is this replay's
  }
  if (what.misses == 0) {  // nor did steps before miss anything: the preparation does not count
    control_.let_pass(kExpectMisses);
  }
  control_.upload(spread(std::max(0, what.misses), 0));
  launch_wander(host_.device(), host_.bytes(), time_, words_.data<std::uint32_t>() + 1, context());
  launch_touch(other_data_.data(), other_data_.bytes(), words_.data<std::uint32_t>() + 1, context());
  // All of this is still under way when the calls below are made, so that the GPU does not wait for the CPU.
  start_.record(stream_.get());
  timed.launch(stream_.get());
  stop_.record(stream_.get());
  backend_->synchronize();
  EchoStepResult result = counted(what, before);
  result.microseconds = stop_.since(start_);
  result.nodes = timed.nodes();
  result.natural_misses = natural;
  if (claims(what) && last_ < StepPart::recall) {  // what got slots was not written
    std::vector<RowRun> rows;
    for (std::int32_t session = 0; session < sizes_.batch; ++session) {
      rows.push_back({.first = control_.rows_of(session).first + position(), .count = 1});
    }
    backend_->release(layers_.views(), rows);
  }
  return result;
}

EchoStepResult StepCase::counted(const EchoStepReplay& what, const std::vector<LayerCounters>& before) const {
  const std::vector<LayerCounters> after = layers_.counters();
  const bool recalls = last_ == StepPart::recall || last_ == StepPart::attend;
  EchoStepResult result{};
  for (std::size_t layer = 0; layer < after.size(); ++layer) {
    const auto found = [&](std::int64_t LayerCounters::* count) { return after[layer].*count - before[layer].*count; };
    const auto require_count = [&](const char* name, std::int64_t count, std::int64_t least, std::int64_t most) {
      if (recalls && (count < least || count > most)) {
        throw StateError(std::string(name) + ": " + std::to_string(count) + " counted in layer " +
                         std::to_string(layer) + ", expected " + std::to_string(least) + " to " + std::to_string(most));
      }
    };
    const std::int64_t misses = found(&LayerCounters::misses);
    const std::int64_t used = found(&LayerCounters::prefetched_used);
    const std::int64_t appended = sizes_.new_rows != 0 ? sizes_.batch : 0;
    // Each row that is prefetched may take the slot of one that turns out to be selected. So may each new row: where a
    // block has left hardly anything of its window, which is small for one session, it hints at a row that it has just
    // fetched (leave_hint.cuh); that was in the preparation, and is selected again.
    const std::int64_t taken = found(&LayerCounters::prefetched) + appended;
    if (what.misses >= 0) {
      require_count("misses and used prefetches", misses + used, what.misses, what.misses + taken);
    }
    require_count("hits", found(&LayerCounters::hits), entries() - misses, entries() - misses);
    require_count("appended", found(&LayerCounters::appended), appended, appended);
    result.hits += found(&LayerCounters::hits);
    result.misses += misses;
    result.evictions += found(&LayerCounters::evictions);
    result.lost_races += found(&LayerCounters::lost_races);
    result.candidates += found(&LayerCounters::candidates);
    result.full_selects += found(&LayerCounters::full_selects);
    result.prefetched += found(&LayerCounters::prefetched);
    result.prefetched_used += used;
    result.prefetches_capped += found(&LayerCounters::prefetches_capped);
    result.forecast += found(&LayerCounters::forecast);
    result.forecast_used += found(&LayerCounters::forecast_used);
  }
  return result;
}

}  // namespace echo::bench
