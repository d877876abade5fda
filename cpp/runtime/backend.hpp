#pragma once
// What a backend is: memory, copies, the verbs, and capture. The runtime orders verbs and owns lifetimes; a backend
// executes them, in the order of the calls. Which backends exist is decided by which are linked (backends.hpp).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/params.hpp"
#include "runtime/memory.hpp"

namespace echo {

/// Rows per 1,000 scored tokens: on an H200 (PCIe Gen5 x16) some 33 rows that were not read lately travel in a
/// microsecond, whatever their size, while the indexer scores 26,000 tokens. Measured over pools of many GiB: what
/// bounds these rows is the translation of their addresses, which no short measurement at start-up would meet.
inline constexpr double kPrefetchCap = 1.2;

/// The largest passes a runtime will run: what a backend's working memory is sized for.
struct ScratchSizes {
  ShapeView shape;
  std::int32_t layers;
  std::int32_t rows;        ///< of a pass
  std::int32_t block_rows;  ///< of one row block
  std::int32_t slots;       ///< of one layer's pool
  std::int64_t host_rows;
  std::int32_t splits;            ///< of attention
  std::int32_t entries = 0;       ///< sessions of a step
  std::int32_t forecast_cap = 0;  ///< rows that are forecast for each of them and layer; 0: none
};

class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  /// "cpu", "cuda:0".
  virtual const std::string& device() const = 0;
  /// The host pool's memory: readable by kernels.
  virtual MemoryResource& host_memory() = 0;
  virtual MemoryResource& device_memory() = 0;

  /// Takes the working memory of the verbs; called once, before any verb. Throws CapacityError.
  virtual void prepare(const ScratchSizes& /*sizes*/) {}

  /// Whether score sifts where it is asked to (SiftView). The same from prepare() on.
  virtual bool sifts() const { return false; }
  /// Rows that this device can fetch while it scores 1,000 tokens: what prefetch_cap = -1 stands for.
  virtual double prefetch_cap() const { return kPrefetchCap; }

  // What addresses of arrays have to be multiples of, in bytes, besides the size of an element. The same from prepare()
  // on.
  virtual std::size_t row_alignment() const { return 1; }     ///< kv of encoded rows
  virtual std::size_t score_alignment() const { return 1; }   ///< score's index_q
  virtual std::size_t attend_alignment() const { return 1; }  ///< attend's q and out

  /// Whether forecast does anything. The same from prepare() on.
  virtual bool forecasts() const { return false; }

  /// The stream (cudaStream_t as an integer) that all later calls work on; no meaning for the CPU.
  virtual void use_stream(std::uintptr_t stream) = 0;

  // Ordered with the verbs; copies are finished on return. Never used within a step.
  virtual void copy_to_device(void* device, const void* host, std::size_t bytes) = 0;
  virtual void copy_to_host(void* host, const void* device, std::size_t bytes) = 0;
  virtual void fill(void* device, int byte, std::size_t bytes) = 0;
  /// The same as copy_to_host for counters, which may be read in the middle of a step: where it can, a backend does
  /// not wait for verbs under way, and of what they change the old or the new values are read, word by word.
  virtual void read_counters(void* host, const void* device, std::size_t bytes) { copy_to_host(host, device, bytes); }

  /// Starts a pass: uploads `bytes` of the control block. Returns before the copy is done; `host` may be reused.
  /// Throws what an earlier pass is known to have gone wrong with; nothing is uploaded then.
  virtual void upload_control(void* device, const void* host, std::size_t bytes) = 0;

  virtual void begin(const BeginParams& params) = 0;
  virtual void append(const AppendParams& params) = 0;
  virtual void score(const ScoreParams& params) = 0;
  virtual void select(const SelectParams& params) = 0;
  virtual void recall(const RecallParams& params) = 0;
  virtual void forecast(const ForecastParams& /*params*/) {}
  virtual void attend(const AttendParams& params) = 0;
  virtual void commit(const CommitParams& params) = 0;
  /// The given host rows lose their slots in each of the layers. No data moves.
  virtual void release(std::span<const LayerView> layers, std::span<const RowRun> rows) = 0;

  /// While this is on, nothing but this backend's verbs works on the stream. A verb may then begin while the one before
  /// it ends: what a kernel of somebody else leaves behind when it lets others begin, nobody knows.
  virtual void unbroken(bool /*on*/) {}

  /// Waits until everything called so far has happened; throws what went wrong in it.
  virtual void synchronize() = 0;
  /// The same, but leaves what kernels found wrong to be thrown by the next pass or synchronize().
  virtual void wait() {}
  /// Waits and lets go of the caller's stream; never throws. Only memory is given back afterwards.
  virtual void retire() noexcept {}

  /// Marks all that was called so far; done(mark) tells, without waiting, whether it has happened.
  virtual std::uint64_t mark() { return 0; }
  virtual bool done(std::uint64_t /*mark*/) { return true; }

  /// Records `body` (verbs and whatever a model does) and returns what replays it. The CPU backend replays by
  /// running it again.
  virtual std::function<void()> capture(const std::function<void()>& body) = 0;
};

/// A sequence of verbs that nothing comes between, as long as this lives.
class UnbrokenVerbs {
 public:
  explicit UnbrokenVerbs(Backend& backend) : backend_(backend) { backend_.unbroken(true); }
  ~UnbrokenVerbs() { backend_.unbroken(false); }
  UnbrokenVerbs(const UnbrokenVerbs&) = delete;
  UnbrokenVerbs& operator=(const UnbrokenVerbs&) = delete;

 private:
  Backend& backend_;
};

}  // namespace echo
