// Attention of one decode step as benchmarks call it: a graph of `layers` calls, each with its own rows, slots and
// queries, so that L2 caches are as cold as in a step. Memory belongs to the caller.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cache_manager/replacement.hpp"
#include "echo/errors.hpp"
#include "kernels/cuda_handles.hpp"
#include "runtime/attention_splits.hpp"
#include "runtime/backends.hpp"
#include "timed_graph.hpp"

namespace {

using namespace echo;

/// Those made for this GPU.
RuntimeConfig own_kernels() {
  RuntimeConfig config;
  config.kernels = "auto";
  return config;
}

thread_local std::string g_problem;

struct AttendBench {
  std::unique_ptr<Backend> backend = make_cuda_backend(0, own_kernels());
  Buffer state{backend->device_memory(), sizeof(ReplacementState), "state"};
  Stream stream;
  std::optional<bench::TimedGraph> graph;

  ~AttendBench() { backend->retire(); }
};

}  // namespace

extern "C" {

struct EchoAttendCase {
  std::int32_t layers;
  std::int32_t batch;
  std::int32_t heads;
  std::int32_t row_bytes;  ///< 656 or 1152
  std::int32_t top_k;
  std::int32_t splits;
  std::int32_t slots;  ///< of a layer's pool
  float scale;
};

/// Splits of a runtime for steps of up to `rows` query rows, if nobody sets them.
ECHO_API std::int32_t echo_attend_splits(std::int32_t rows, std::int32_t heads, std::int32_t top_k) {
  ModelShape shape = ModelShape::deepseek_v32();
  shape.query_heads = heads;
  shape.top_k = top_k;
  return static_cast<std::int32_t>(chosen_attention_splits(shape, rows));
}

/// What went wrong in the last call that said so.
ECHO_API const char* echo_attend_problem() { return g_problem.c_str(); }

ECHO_API void echo_attend_destroy(void* bench) { delete static_cast<AttendBench*>(bench); }

/// Device pointers, one per layer: pools u8 [slots, row_bytes] without NaN codes, slots i32 [batch, top_k], q bf16
/// [batch, heads, 576], out bf16 [batch, heads, 512]. Returns nullptr if something is wrong.
ECHO_API void* echo_attend_create(const EchoAttendCase* c, void* const* pools, const std::int32_t* const* slots,
                                  const void* const* q, void* const* out) {
  try {
    auto bench = std::make_unique<AttendBench>();
    ShapeView shape =
        shape_view(ModelShape::deepseek_v32(c->row_bytes == 656 ? RowFormat::fp8_656 : RowFormat::bf16_1152));
    shape.query_heads = c->heads;
    shape.top_k = c->top_k;
    bench->backend->prepare({.shape = shape,
                             .layers = 1,
                             .rows = c->batch,
                             .block_rows = c->batch,
                             .slots = c->slots,
                             .host_rows = 64,
                             .splits = c->splits});
    const ReplacementState no_nan{};  // of all layers: rows have no NaN codes
    bench->backend->copy_to_device(bench->state.data(), &no_nan, sizeof no_nan);
    bench->backend->use_stream(reinterpret_cast<std::uintptr_t>(bench->stream.get()));
    const auto body = [&] {
      for (std::int32_t layer = 0; layer < c->layers; ++layer) {
        AttendParams params{};
        params.layer.pool = static_cast<std::byte*>(pools[layer]);
        params.layer.replacement = bench->state.data<ReplacementState>();
        params.layer.slots = c->slots;
        params.layer.row_bytes = c->row_bytes;
        params.block = {.first = 0, .count = c->batch, .tick_offset = 0};
        params.shape = shape;
        params.q = q[layer];
        params.q_dtype = DType::bf16;
        params.scale = c->scale;
        params.slots = slots[layer];
        params.out = out[layer];
        params.out_dtype = DType::bf16;
        params.splits = c->splits;
        bench->backend->attend(params);
      }
    };
    body();
    bench->backend->synchronize();
    bench->graph.emplace(bench->stream.get(), body);
    return bench.release();
  } catch (const std::exception& error) {
    g_problem = error.what();
    return nullptr;
  }
}

/// Nodes of the graph.
ECHO_API std::int32_t echo_attend_nodes(void* bench) { return static_cast<AttendBench*>(bench)->graph->nodes(); }

/// Replays the graph `times` times; us[i] = microseconds of the i-th replay on the GPU. Returns 0, or 1 if something is
/// wrong.
ECHO_API int echo_attend_replay(void* bench, std::int32_t times, float* us) {
  auto& b = *static_cast<AttendBench*>(bench);
  try {
    bench::TimeEvent begin;
    bench::TimeEvent end;
    for (std::int32_t i = 0; i < times; ++i) {
      begin.record(b.stream.get());
      b.graph->launch(b.stream.get());
      end.record(b.stream.get());
      b.backend->synchronize();
      us[i] = static_cast<float>(end.since(begin));
    }
    return 0;
  } catch (const std::exception& error) {
    g_problem = error.what();
    return 1;
  }
}
}
