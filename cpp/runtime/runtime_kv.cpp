// Export and import of a session's KV.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "echo/errors.hpp"
#include "runtime/in_use.hpp"
#include "runtime/runtime_impl.hpp"

namespace echo {

namespace {

bool same_rows(const std::vector<KvRun>& a, const std::vector<KvRun>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const KvRun& x, const KvRun& y) { return x.rows == y.rows && x.tokens == y.tokens; });
}

/// Throws InvalidArgument naming `name` unless there are index keys and predictions for `kv.length` tokens of all
/// layers.
void check_keys(const char* name, const KvRuns& kv, const ModelShape& shape) {
  const auto layers = static_cast<std::size_t>(shape.layers);
  if (kv.index_keys.size() != layers || kv.thresholds.size() != layers || kv.deviations.size() != layers) {
    throw InvalidArgument(std::string(name) +
                          ": index_keys, thresholds and deviations must have an entry for each of " +
                          std::to_string(layers) + " layers");
  }
  const std::int64_t blocks = blocks_of(kv.length);
  const auto expected = static_cast<std::size_t>(blocks * shape.index_block_bytes());
  for (const std::vector<std::byte>& keys : kv.index_keys) {
    if (keys.size() != expected) {
      throw InvalidArgument(std::string(name) + ": index_keys of a layer have " + std::to_string(keys.size()) +
                            " bytes, expected " + std::to_string(expected));
    }
  }
}

}  // namespace

std::vector<KvRun> RuntimeImpl::runs_of(const State& session, std::int32_t layer, std::int64_t tokens) const {
  std::vector<KvRun> runs;
  std::int64_t position = 0;
  for (const RowRun& run : row_runs(session, 0, tokens)) {
    runs.push_back({.first_token = position,
                    .tokens = run.count,
                    .rows = pool_->row(layer, run.first),
                    .stride = plan_.host_row_stride});
    position += run.count;
  }
  return runs;
}

KvRuns RuntimeImpl::views_of(const State& session, std::int64_t tokens) const {
  KvRuns kv;
  kv.length = tokens;
  kv.row_bytes = plan_.shape.row_bytes();
  kv.index_block_bytes = plan_.shape.index_block_bytes();
  const auto held = static_cast<std::ptrdiff_t>(blocks_of(tokens));
  kv.keep_alive = blocks_->view(session.id, {session.blocks.begin(), session.blocks.begin() + held}, pool_);
  kv.thresholds.assign(static_cast<std::size_t>(plan_.shape.layers), std::numeric_limits<float>::quiet_NaN());
  kv.deviations = kv.thresholds;
  const std::int64_t blocks = blocks_of(tokens);
  for (std::int32_t layer = 0; layer < plan_.shape.layers; ++layer) {
    kv.rows.push_back(runs_of(session, layer, tokens));
    kv.index_keys.emplace_back(static_cast<std::size_t>(blocks * plan_.shape.index_block_bytes()));
  }
  return kv;
}

void RuntimeImpl::for_each_key_run(const State& session, std::int32_t layer, std::int64_t tokens,
                                   const std::function<void(std::byte*, std::size_t, std::size_t)>& copy) const {
  const LayerView& view = state_->layer(layer);
  std::size_t offset = 0;
  for (const RowRun& run : row_runs(session, 0, tokens)) {
    const std::int64_t blocks = blocks_of(run.count);
    const auto bytes = static_cast<std::size_t>(blocks * view.index_block_bytes);
    copy(row_address(view.index_keys, run.first / kBlockTokens, view.index_block_bytes), offset, bytes);
    offset += bytes;
  }
}

KvRuns RuntimeImpl::export_kv(const Session& session) {
  const InUse in_use(in_use_);
  require_open();
  const State& state = usable(session);
  backend_->synchronize();
  KvRuns kv = views_of(state, state.length);
  for (std::int32_t layer = 0; layer < plan_.shape.layers; ++layer) {
    std::byte* keys = kv.index_keys[static_cast<std::size_t>(layer)].data();
    for_each_key_run(state, layer, state.length, [&](std::byte* device, std::size_t offset, std::size_t bytes) {
      backend_->copy_to_host(keys + offset, device, bytes);
    });
  }
  SessionPrediction prediction = state_->read_prediction(state.index);
  kv.thresholds = std::move(prediction.thresholds);
  kv.deviations = std::move(prediction.deviations);
  return kv;
}

KvRuns RuntimeImpl::begin_import(const Session& session, std::int64_t tokens) {
  const InUse in_use(in_use_);
  require_open();
  State& state = usable(session);
  KvRuns kv = start_import(state, tokens);
  state.importing = kv.keep_alive;
  return kv;
}

KvRuns RuntimeImpl::start_import(const State& session, std::int64_t tokens) {
  if (session.length != 0) {
    throw StateError("session: session " + std::to_string(session.id) + " holds " + std::to_string(session.length) +
                     " tokens already; KV is imported into an empty one");
  }
  if (tokens < 1) {
    throw InvalidArgument("tokens: " + std::to_string(tokens) + " given, expected at least 1");
  }
  require_room(session, tokens);
  if (session.used) {
    backend_->wait();  // steps in flight may still read or write the rows
  }
  KvRuns kv = views_of(session, tokens);
  kv.writable = true;
  return kv;
}

void RuntimeImpl::finish_import(const Session& session, const KvRuns& filled) {
  const InUse in_use(in_use_);
  require_open();
  State& state = usable(session);
  // Rows that lie elsewhere would be lost: the session's own were never filled then.
  const bool begun = state.length == 0 && filled.length >= 1 && filled.length <= state.capacity && filled.writable &&
                     filled.keep_alive != nullptr && filled.keep_alive == state.importing.lock() &&
                     filled.rows.size() == static_cast<std::size_t>(plan_.shape.layers);
  if (!begun || !same_rows(filled.rows.front(), runs_of(state, 0, filled.length))) {
    throw InvalidArgument("filled: it is not what begin_import gave for this session, or the session was used since");
  }
  check_keys("filled", filled, plan_.shape);
  complete_import(state, filled);
}

void RuntimeImpl::complete_import(State& session, const KvRuns& filled) {
  session.importing.reset();
  for (std::int32_t layer = 0; layer < plan_.shape.layers; ++layer) {
    const std::byte* keys = filled.index_keys[static_cast<std::size_t>(layer)].data();
    for_each_key_run(session, layer, filled.length, [&](std::byte* device, std::size_t offset, std::size_t bytes) {
      backend_->copy_to_device(device, keys + offset, bytes);
    });
  }
  // What is not finite is unknown: a moving average would never forget it.
  SessionPrediction prediction{.thresholds = filled.thresholds, .deviations = filled.deviations};
  for (std::vector<float>* values : {&prediction.thresholds, &prediction.deviations}) {
    std::ranges::replace_if(
        *values, [](float value) { return !std::isfinite(value); }, std::numeric_limits<float>::quiet_NaN());
  }
  state_->write_prediction(session.index, prediction);
  session.length = filled.length;
}

void RuntimeImpl::import_kv(const Session& session, const KvRuns& source) {
  const InUse in_use(in_use_);
  require_open();
  State& state = usable(session);
  const auto layers = static_cast<std::size_t>(plan_.shape.layers);
  if (source.rows.size() != layers || source.row_bytes != plan_.shape.row_bytes()) {
    throw InvalidArgument("source: it has rows of " + std::to_string(source.rows.size()) + " layers and " +
                          std::to_string(source.row_bytes) + " bytes, expected " + std::to_string(layers) +
                          " layers and " + std::to_string(plan_.shape.row_bytes()) + " bytes");
  }
  if (source.length < 1) {
    throw InvalidArgument("source: it holds " + std::to_string(source.length) + " tokens, expected at least 1");
  }
  check_keys("source", source, plan_.shape);
  for (const std::vector<KvRun>& runs : source.rows) {
    std::int64_t tokens = 0;
    for (const KvRun& run : runs) {
      if (run.first_token != tokens || run.tokens < 1 || run.stride < plan_.shape.row_bytes()) {
        throw InvalidArgument("source: runs must follow each other, with rows at least " +
                              std::to_string(plan_.shape.row_bytes()) + " bytes apart");
      }
      tokens += run.tokens;
    }
    if (tokens != source.length) {
      throw InvalidArgument("source: a layer has rows of " + std::to_string(tokens) + " tokens, expected " +
                            std::to_string(source.length));
    }
  }
  KvRuns target = start_import(state, source.length);
  const auto row_bytes = static_cast<std::size_t>(plan_.shape.row_bytes());
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::int64_t position = 0;
    auto from = source.rows[layer].begin();
    for (const KvRun& to : target.rows[layer]) {
      for (std::int64_t i = 0; i < to.tokens; ++i, ++position) {
        while (position >= from->first_token + from->tokens) {
          ++from;
        }
        std::memcpy(row_address(to.rows, i, to.stride),
                    row_address(from->rows, position - from->first_token, from->stride), row_bytes);
      }
    }
  }
  target.index_keys = source.index_keys;
  target.thresholds = source.thresholds;
  target.deviations = source.deviations;
  complete_import(state, target);
}

}  // namespace echo
