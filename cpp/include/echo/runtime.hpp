#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "echo/array.hpp"
#include "echo/batch.hpp"
#include "echo/errors.hpp"
#include "echo/export.hpp"
#include "echo/forward_pass.hpp"
#include "echo/kv_runs.hpp"
#include "echo/model_shape.hpp"
#include "echo/planner.hpp"
#include "echo/runtime_config.hpp"
#include "echo/session.hpp"
#include "echo/stats.hpp"

namespace echo {

class RuntimeImpl;

/// Records what `body` puts on the device and returns what replays it; how a model captures itself with its own
/// framework's graphs.
using Capturer = std::function<std::function<void()>(const std::function<void()>& body)>;

/// Copies of one layer's residency state, for tests and tools. kNone (-1) means none.
struct CacheState {
  std::vector<std::int32_t> slot_of;  ///< [host rows] -> slot
  std::vector<std::int32_t> host_of;  ///< [slots] -> host row
  std::vector<std::int32_t>
      stamp;                     ///< [slots] tick of the last use; -1: free; below: fetched ahead, and not used since
  std::vector<std::byte> slots;  ///< [slots, row_bytes]
};

/// Keeps the KV rows of many sessions in host memory and serves sparse attention from a small pool of rows
/// per layer. Takes all its memory at construction. Calls must not overlap: a second call from another thread,
/// or from within a forward, throws StateError.
class ECHO_API Runtime {
 public:
  /// Throws InvalidArgument naming a field, or CapacityError with a table of what was asked and what there is.
  Runtime(const ModelShape& shape, const RuntimeConfig& config);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const Plan& plan() const;
  /// "cpu" or "cuda:N".
  const std::string& device() const;

  /// Opens a session that can hold `max_tokens` tokens, prompt and output together; its host rows are set
  /// aside now, in one contiguous run where possible. Throws CapacityError if they do not fit.
  Session open_session(std::int64_t max_tokens);

  /// Appends `tokens` (at most prefill_chunk) to the session, with one query per token. `forward` defaults to
  /// the captured one. If it throws, the session is as before.
  void prefill(const Session& session, std::span<const std::int32_t> tokens, const Forward& forward = {});

  /// Makes `forward` the model of this runtime: prefill runs it directly, step replays it for the smallest of
  /// `batch_sizes` (sessions) that holds the batch, with padding rows. Replaces what was captured for the same
  /// number of query rows; with other numbers (speculative decoding) both are kept. Runs it once per size on padding
  /// rows alone to warm it up. `capturer` defaults to the backend's own: a CUDA graph, or running the forward again on
  /// the CPU.
  void capture(Forward forward, const std::vector<std::int32_t>& batch_sizes, std::int32_t query_rows = 1,
               const Capturer& capturer = {});

  /// One decode step. With `forward` it runs eagerly on exactly the batch's rows; without, the captured forward
  /// is replayed (an empty batch then means padding rows only). Appends each session's tokens. Outputs are whatever
  /// the forward writes; who calls step samples. If the forward throws, every session is as before.
  void step(const Batch& batch, const Forward& forward = {});

  /// Views of the session's rows on the host, all layers; waits for what is still being written. As long as a copy of
  /// the result lives, the rows are given to nobody else, also when the session is closed. (A session that is
  /// truncated and appended to writes to its own rows, and the views show it: copy, or import, first.)
  KvRuns export_kv(const Session& session);
  /// Fills an empty session with the KV of `source` (which may belong to another runtime of the same shape).
  void import_kv(const Session& session, const KvRuns& source);
  /// The same without a copy: begin_import returns writable views for `tokens` tokens of an empty session,
  /// finish_import uploads their index keys and makes the tokens part of the session. It takes what the last
  /// begin_import gave, and only if neither a pass nor another import has written to the session since.
  KvRuns begin_import(const Session& session, std::int64_t tokens);
  void finish_import(const Session& session, const KvRuns& filled);

  /// Predicted k-th score per layer (moving average), NaN where there is none yet.
  std::vector<float> thresholds(const Session& session) const;
  /// Does not wait for steps in flight where the backend can do without (CUDA): their part may be missing, or be
  /// counted in part. After synchronize() the counters are exact.
  RuntimeStats stats() const;
  /// Tokens that sessions could be opened for now, in blocks of 64. Does not wait for the device.
  std::int64_t free_host_tokens() const;
  CacheState cache_state(std::int32_t layer) const;

  /// Closes all sessions and frees all memory. Idempotent; everything but close throws StateError afterwards.
  void close();
  bool closed() const;

  /// Stream (cudaStream_t as an integer) that all later calls work on, in order with earlier ones; until the first
  /// call, a stream of the runtime's own. What a forward launches has to be on the same stream, and the stream has to
  /// live until the next use_stream or close. No meaning on the CPU.
  void use_stream(std::uintptr_t stream);
  /// Waits until everything called so far has happened; throws what went wrong in it.
  void synchronize();

 private:
  std::shared_ptr<RuntimeImpl> impl_;
};

/// "echo 0.1.0, CUDA for 90a" or "echo 0.1.0, CPU only".
ECHO_API std::string build_info();

}  // namespace echo
