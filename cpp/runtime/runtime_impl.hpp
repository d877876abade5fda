#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "echo/runtime.hpp"
#include "runtime/block_pool.hpp"
#include "runtime/control_block.hpp"
#include "runtime/device_state.hpp"
#include "runtime/host_pool.hpp"
#include "runtime/pass_state.hpp"
#include "runtime/session_state.hpp"

namespace echo {

/// The logic behind Runtime: order of stages, lifetimes, admission. The same for every backend.
class RuntimeImpl : public std::enable_shared_from_this<RuntimeImpl> {
 public:
  RuntimeImpl(const ModelShape& shape, const RuntimeConfig& config);
  ~RuntimeImpl();

  const Plan& plan() const { return plan_; }
  const std::string& device() const { return device_name_; }
  Session open_session(std::int64_t max_tokens);
  void close_session(detail::SessionState& session);
  Session fork(const Session& session, std::int64_t max_tokens);
  void truncate(const Session& session, std::int64_t length);
  void pause(const Session& session);
  void resume(const Session& session);
  void prefill(const Session& session, std::span<const std::int32_t> tokens, const Forward& forward);
  void capture(Forward forward, const std::vector<std::int32_t>& batch_sizes, std::int32_t query_rows,
               const Capturer& capturer);
  void step(const Batch& batch, const Forward& forward);
  KvRuns export_kv(const Session& session);
  KvRuns begin_import(const Session& session, std::int64_t tokens);
  void finish_import(const Session& session, const KvRuns& filled);
  void import_kv(const Session& session, const KvRuns& source);
  std::vector<float> thresholds(const Session& session);
  RuntimeStats stats();
  std::int64_t free_host_tokens();
  CacheState cache_state(std::int32_t layer);
  void close();
  bool closed() const { return closed_; }
  void use_stream(std::uintptr_t stream);
  void synchronize();

 private:
  friend struct RuntimeTestAccess;
  using State = detail::SessionState;
  class InUse;
  struct DeletePass {
    void operator()(ForwardPass* pass) const;
  };
  using PassPointer = std::unique_ptr<ForwardPass, DeletePass>;
  struct Captured {
    PassPointer pass;
    std::function<void()> replay;
  };

  void require_open() const;
  /// The session's state; InvalidArgument or StateError naming `session` if it cannot be used here.
  State& usable(const Session& session) const;
  /// The same, and not paused.
  State& running(const Session& session) const;
  void require_room(const State& session, std::int64_t tokens) const;
  void check_batch(const Batch& batch) const;
  /// "1 x 1, 2 x 1": sessions x query rows, for people.
  std::string captured_sizes() const;
  /// First of `blocks` new ticks, one for each block of a pass.
  std::int32_t take_ticks(std::size_t blocks);

  PassPointer make_pass(std::int32_t batch, std::int32_t query_rows, bool prefill);
  static void run(ForwardPass& pass, const Forward& forward);
  /// Runs `body` on what the control block says; if it throws, the sessions are as before.
  void execute(const std::function<void()>& body, std::span<State* const> sessions, std::int64_t new_tokens);
  /// Undoes what a failed pass left behind for `tokens` new tokens of each session.
  void roll_back(std::span<State* const> sessions, std::int64_t tokens);

  std::vector<KvRun> runs_of(const State& session, std::int32_t layer, std::int64_t tokens) const;
  /// Views of the session's rows, which keep their blocks; index keys and predictions are still to be filled.
  KvRuns views_of(const State& session, std::int64_t tokens) const;
  KvRuns start_import(const State& session, std::int64_t tokens);
  void complete_import(State& session, const KvRuns& filled);
  enum class Rows : std::uint8_t { all, own };
  /// Host rows of positions [begin, end) as runs; with Rows::own without those that forks share.
  std::vector<RowRun> row_runs(const State& session, std::int64_t begin, std::int64_t end,
                               Rows which = Rows::all) const;

  /// Free row of per-session state for a session of so many tokens; throws where there is none.
  std::size_t free_place(std::int64_t max_tokens) const;
  Session add_session(std::size_t place, std::int64_t length, std::int64_t capacity, std::vector<std::int32_t> blocks);
  /// Copies the first `tokens` rows and the index keys of a block, all layers.
  void copy_block(std::int32_t from, std::int32_t to, std::int64_t tokens);
  /// Calls copy(device address, offset in the session's keys, bytes) for each run of blocks.
  void for_each_key_run(const State& session, std::int32_t layer, std::int64_t tokens,
                        const std::function<void(std::byte*, std::size_t, std::size_t)>& copy) const;

  std::string device_name_;
  Plan plan_;
  std::shared_ptr<Backend> backend_;
  std::shared_ptr<HostPool> pool_;
  std::shared_ptr<DeviceState> state_;
  std::unique_ptr<BlockPool> blocks_;
  ControlBlock control_;

  Forward forward_;
  std::map<std::pair<std::int32_t, std::int32_t>, Captured> captured_;  // by (query rows, batch)
  std::vector<std::shared_ptr<State>> open_;                            // [max_sessions], null where free
  std::int64_t sessions_opened_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t prefill_tokens_ = 0;
  std::int32_t tick_ = 0;
  bool closed_ = false;
  std::atomic<bool> in_use_ = false;
};

}  // namespace echo
