#include "recall_case.hpp"

#include <algorithm>
#include <span>
#include <string>

#include "check.hpp"
#include "draw.hpp"
#include "echo/errors.hpp"
#include "echo/model_shape.hpp"
#include "echo/runtime_config.hpp"
#include "require.hpp"
#include "rows.hpp"
#include "runtime/backends.hpp"

namespace echo::bench {
namespace {

constexpr std::size_t kOtherBytes = std::size_t{1} << 30;  ///< many L2 caches, and 0.25 ms in which calls can be made
constexpr std::int32_t kRowDim = 576;

EchoBenchCase checked(const EchoBenchCase& sizes) {
  require(sizes.batch > 0, "batch", sizes.batch, "at least 1");
  const std::int32_t most = sizes.batch * (kTopK - sizes.new_rows);
  require(sizes.misses >= 0 && sizes.misses <= most, "misses", sizes.misses, "0 to " + std::to_string(most));
  require(sizes.row_bytes == 656 || sizes.row_bytes == 1152, "row_bytes", sizes.row_bytes, "656 or 1152");
  require(sizes.length > kTopK + kNewTokens && sizes.length <= kMostTokens, "length", sizes.length,
          "up to " + std::to_string(kMostTokens) + " tokens, and more than a selection");
  require(sizes.released == 0 || (sizes.released > kTopK && sizes.released <= kMostTokens && sizes.new_rows == 0),
          "released", sizes.released, "0, or tokens as in length, and no new rows");
  const std::int64_t tokens = static_cast<std::int64_t>(sizes.batch) * sizes.length + sizes.released;
  const std::int32_t sessions = sizes.batch + (sizes.released != 0 ? 1 : 0);
  require(sizes.pool_slots > sessions * kTopK && sizes.pool_slots < tokens, "pool_slots", sizes.pool_slots,
          "more than the sessions select and less than they have");
  return sizes;
}

std::vector<std::int32_t> sessions_of(const EchoBenchCase& sizes) {
  std::vector<std::int32_t> sessions(static_cast<std::size_t>(sizes.batch), sizes.length);
  if (sizes.released != 0) {
    sessions.push_back(sizes.released);
  }
  return sessions;
}

ShapeView shape_of(const EchoBenchCase& sizes) {
  const RowFormat format = sizes.row_bytes == 656 ? RowFormat::fp8_656 : RowFormat::bf16_1152;
  return shape_view(ModelShape::deepseek_v32(format));
}

}  // namespace

RecallCase::RecallCase(const EchoBenchCase& sizes, HostRows& host)
    : sizes_(checked(sizes)),
      host_(host),
      backend_(make_cuda_backend(0, RuntimeConfig{})),
      shape_(shape_of(sizes)),
      control_(*backend_, sessions_of(sizes)),
      layers_(*backend_,
              {.layers = kLayers,
               .slots = sizes.pool_slots,
               .row_bytes = sizes.row_bytes,
               .host_rows = control_.host_rows(),
               .index_block_bytes = 0},
              host.device()),
      layer_entries_(static_cast<std::int64_t>(control_.sessions()) * kTopK) {
  backend_->use_stream(reinterpret_cast<std::uintptr_t>(stream_.get()));
  backend_->prepare({.shape = shape_,
                     .layers = kLayers,
                     .rows = control_.sessions(),
                     .block_rows = control_.sessions(),
                     .slots = sizes_.pool_slots,
                     .host_rows = control_.host_rows(),
                     .splits = 1});
  const auto allocate = [&](std::int64_t bytes, const char* name) {
    Buffer buffer(backend_->device_memory(), static_cast<std::size_t>(bytes), name);
    backend_->fill(buffer.data(), 0, buffer.bytes());
    return buffer;
  };
  selection_ = allocate(kLayers * layer_entries_ * 4, "selection");
  slots_ = allocate(kLayers * layer_entries_ * 4, "selected slots");
  missing_ = allocate(kLayers * std::int64_t{4} * sizes_.misses, "missing rows");
  shuffled_ = allocate(kLayers * std::int64_t{4} * sizes_.misses, "missing rows");
  scores_ = allocate(kLayers * sizes_.batch * control_.score_stride() * 4, "scores");
  kth_score_ = allocate(sizes_.batch * std::int64_t{4}, "k-th scores");
  kv_ = allocate(sizes_.new_rows * kLayers * std::int64_t{2} * sizes_.batch * kRowDim, "kv");
  gathered_ = allocate(static_cast<std::int64_t>(sizes_.misses) * sizes_.row_bytes, "gathered rows");
  other_data_ = allocate(kOtherBytes, "other data");
  draw_failed_ = allocate(8, "result of the draw");
  host_.fill(kLayers, sizes_.row_bytes, control_.host_rows(), context());
  fill_pools();
}

RecallCase::~RecallCase() { backend_->retire(); }

std::int32_t RecallCase::last_position(std::int32_t session) const {
  if (session == sizes_.batch) {
    return sizes_.released - 1;
  }
  return sizes_.new_rows == 0 ? sizes_.length - 1 : sizes_.length - kNewTokens + new_tokens_ - 1;
}

std::vector<Entry> RecallCase::spread(std::int32_t first, std::int32_t end, std::int64_t misses, bool with_hits) const {
  std::vector<Entry> entries(static_cast<std::size_t>(end));
  const std::int64_t count = end - first;
  for (std::int32_t i = first; i < end; ++i) {
    Entry& entry = entries[static_cast<std::size_t>(i)];
    entry.position = last_position(i);
    entry.misses = static_cast<std::int32_t>((i - first + 1) * misses / count - (i - first) * misses / count);
    entry.hits = with_hits ? kTopK - entry.misses : 0;
  }
  return entries;
}

void RecallCase::begin(const Pass& pass) {
  backend_->begin({.step = control_.step(static_cast<std::int32_t>(pass.entries.size())),
                   .host_blocks = control_.host_rows() / kTokensPerBlock,
                   .layers = pass.new_rows ? layers_.views() : std::span<const LayerView>()});
}

void RecallCase::prepare(const Pass& pass) {
  ++seed_;
  control_.upload(pass.entries);
  const StepView step = control_.step(static_cast<std::int32_t>(pass.entries.size()));
  begin(pass);
  if (pass.new_rows) {
    // What they push out is out before anything is drawn; begin is called again while the clock runs.
    std::vector<RowRun> rows;
    for (std::int32_t session = 0; session < sizes_.batch; ++session) {
      rows.push_back(
          {.first = control_.rows_of(session).first + pass.entries[static_cast<std::size_t>(session)].position,
           .count = 1});
    }
    backend_->release(layers_.views(), rows);
  }
  if (pass.timed) {
    launch_fill_scores(scores_.data<float>(), control_.score_stride(), kth_score_.data<float>(), step, seed_,
                       context());
  }
  if (pass.new_rows) {
    launch_fill_kv(kv_.data<std::uint16_t>(), kLayers, kRowDim, step, context());
  }
  launch_draw({.layers = layers_.device_views(),
               .step = step,
               .new_rows = pass.new_rows,
               .seed = seed_,
               .hits_of = control_.hits_of(),
               .misses_of = control_.misses_of(),
               .missing_before = control_.missing_before(),
               .misses = sizes_.misses,
               .layer_entries = layer_entries_,
               .selection = selection_.data<std::int32_t>(),
               .slots = slots_.data<std::int32_t>(),
               .missing = pass.timed ? missing_.data<std::int32_t>() : nullptr,
               .shuffled = pass.timed ? shuffled_.data<std::int32_t>() : nullptr,
               .scores = pass.timed ? scores_.data<float>() : nullptr,
               .score_stride = control_.score_stride(),
               .failed = draw_failed_.data<std::int32_t>()},
              context());
}

RecallParams RecallCase::params(std::int32_t layer, std::int32_t rows) const {
  return {.layer = layers_.views()[static_cast<std::size_t>(layer)],
          .step = control_.step(rows),
          .block = {.first = 0, .count = rows, .tick_offset = 0},
          .shape = shape_,
          .selection = selection_.data<std::int32_t>() + layer * layer_entries_,
          .slots = slots_.data<std::int32_t>() + layer * layer_entries_,
          .scores = nullptr,
          .score_stride = control_.score_stride(),
          .kth_score = nullptr,
          .kv = nullptr,
          .kv_dtype = DType::bf16};
}

void RecallCase::make_resident(std::int32_t first, std::int32_t end, std::int64_t rows) {
  prepare({.entries = spread(first, end, rows, /*with_hits=*/false), .new_rows = false, .timed = false});
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    backend_->recall(params(layer, end));
  }
}

void RecallCase::fill_pools() {
  for (std::int64_t free = layers_.free_slots(); free > 0;) {
    const std::int64_t rows = std::min(free / kLayers, layer_entries_);
    make_resident(0, control_.sessions(), rows);
    backend_->synchronize();
    const std::int64_t left = layers_.free_slots();
    if (rows == 0 || left != free - kLayers * rows) {  // 0: some layers have free slots, others have none
      throw StateError("filling the pools: " + std::to_string(rows) + " rows were selected per layer, " +
                       std::to_string(free - left) + " of " + std::to_string(free) + " free slots were taken");
    }
    free = left;
  }
}

void RecallCase::renew_released_session() {
  const RowRun rows = released_rows();
  backend_->release(layers_.views(), {&rows, 1});
  const std::int32_t session = sizes_.batch;
  for (std::int32_t left = sizes_.pool_slots / control_.sessions(); left > 0; left -= kTopK) {
    make_resident(session, session + 1, std::min(left, kTopK));
  }
}

void RecallCase::call(Kind kind, std::int32_t layer, std::int32_t blocks) {
  RecallParams recall = params(layer, sizes_.batch);
  if (kind == Kind::gather_sorted || kind == Kind::gather_random) {
    const Buffer& rows = kind == Kind::gather_sorted ? missing_ : shuffled_;
    launch_gather({.slab = recall.layer.slab,
                   .host_stride = recall.layer.host_stride,
                   .row_bytes = recall.layer.row_bytes,
                   .rows = rows.data<std::int32_t>() + static_cast<std::int64_t>(layer) * sizes_.misses,
                   .count = sizes_.misses,
                   .target = gathered_.data()},
                  blocks, context());
    return;
  }
  recall.scores = scores_.data<float>() + static_cast<std::int64_t>(layer) * sizes_.batch * control_.score_stride();
  recall.kth_score = kth_score_.data<float>();
  if (kind == Kind::without_copy) {
    recall.layer.row_bytes = 0;
  }
  if (appends(kind)) {
    recall.kv = kv_.data<std::uint16_t>() + static_cast<std::int64_t>(layer) * sizes_.batch * kRowDim;
  }
  backend_->recall(recall);
}

TimedGraph& RecallCase::graph(Kind kind, std::int32_t blocks) {
  const bool gathers = kind == Kind::gather_sorted || kind == Kind::gather_random;
  require(kind != Kind::without_copy || sizes_.new_rows == 0, "kind", static_cast<std::int64_t>(kind),
          "one that copies, where there are new rows");
  require(kind != Kind::released || sizes_.released != 0, "kind", static_cast<std::int64_t>(kind),
          "one without a release: nothing is there to be released");
  require(!gathers || (blocks > 0 && sizes_.misses > 0), "blocks", blocks, "at least 1, and misses to gather");
  Captured& captured = graphs_.at(static_cast<std::size_t>(kind));
  if (captured.graph == nullptr || captured.blocks != blocks) {
    captured.graph = std::make_unique<TimedGraph>(stream_.get(), [this, kind, blocks] {
      const UnbrokenVerbs unbroken(*backend_);
      for (std::int32_t layer = 0; layer < kLayers; ++layer) {
        call(kind, layer, blocks);
      }
    });
    captured.blocks = blocks;
  }
  return *captured.graph;
}

double RecallCase::replay(Kind kind, std::int32_t blocks) {
  TimedGraph& timed = graph(kind, blocks);
  const bool recalls = kind != Kind::gather_sorted && kind != Kind::gather_random;
  if (recalls && sizes_.released != 0) {
    renew_released_session();
  }
  const std::vector<LayerCounters> before = layers_.counters();
  Pass pass{
      .entries = spread(0, sizes_.batch, sizes_.misses, /*with_hits=*/true), .new_rows = appends(kind), .timed = true};
  if (pass.new_rows) {
    require(new_tokens_ < kNewTokens, "new_rows", new_tokens_ + 1, "at most " + std::to_string(kNewTokens));
    ++new_tokens_;
    host_.spoil();
    for (Entry& entry : pass.entries) {
      ++entry.position;
      --entry.hits;  // the new token is selected, too
    }
  }
  last_ = kind;
  bytes_valid_ = bytes_valid_ && kind != Kind::without_copy;
  prepare(pass);
  launch_touch(other_data_.data(), other_data_.bytes(), draw_failed_.data<std::uint32_t>() + 1, context());
  // All of this is still under way when the calls below are made, so that the GPU does not wait for the CPU.
  start_.record(stream_.get());
  if (kind == Kind::released) {
    const RowRun rows = released_rows();
    backend_->release(layers_.views(), {&rows, 1});
  }
  if (pass.new_rows) {
    begin(pass);
  }
  timed.launch(stream_.get());
  stop_.record(stream_.get());
  backend_->synchronize();
  std::int32_t failed = 0;
  backend_->copy_to_host(&failed, draw_failed_.data(), sizeof failed);
  if (failed != 0) {
    throw StateError("draw: a session has too few resident rows, or too few others");
  }
  if (recalls) {
    check_counts(before);
  }
  return stop_.since(start_);
}

int RecallCase::nodes(Kind kind) const {
  const Captured& captured = graphs_.at(static_cast<std::size_t>(kind));
  if (captured.graph == nullptr) {
    throw StateError("kind: it was not replayed yet");
  }
  return captured.graph->nodes();
}

void RecallCase::check_counts(const std::vector<LayerCounters>& before) const {
  const std::vector<LayerCounters> after = layers_.counters();
  for (std::size_t layer = 0; layer < after.size(); ++layer) {
    const auto require_count = [&](const char* name, std::int64_t LayerCounters::* count, std::int64_t expected) {
      const std::int64_t found = after[layer].*count - before[layer].*count;
      if (found != expected) {
        throw StateError(std::string(name) + ": " + std::to_string(found) + " counted in layer " +
                         std::to_string(layer) + ", expected " + std::to_string(expected));
      }
    };
    require_count("misses", &LayerCounters::misses, sizes_.misses);
    require_count("hits", &LayerCounters::hits, static_cast<std::int64_t>(sizes_.batch) * kTopK - sizes_.misses);
    require_count("appended", &LayerCounters::appended, appends(last_) ? sizes_.batch : 0);
  }
}

void RecallCase::verify() {
  if (last_ == Kind::gather_sorted || last_ == Kind::gather_random) {
    throw StateError("verify: the last replay was none that recalls");
  }
  check_pools();
  if (new_tokens_ > 0) {
    check_new_host_rows();
  }
}

}  // namespace echo::bench
