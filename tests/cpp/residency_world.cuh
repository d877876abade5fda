#pragma once
// A layer, a batch of sessions and a model of what is in their rows, in the memory of either backend, for long random
// runs: every call is followed by the checks of residency_checks.cuh, and nothing waits for them.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "residency_checks.cuh"
#include "residency_sizes.hpp"
#include "runtime/backend.hpp"

namespace echo::residency_test {

template <typename Work>
__global__ void for_each_index(Work work, std::int64_t count) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    work(i);
  }
}

/// One layer, its pool and host rows, a batch of sessions that grow, and the model. Calls are checked as they are made.
class World {
 public:
  static constexpr std::int32_t kMostOffset = 2;  ///< ticks of a pass behind its first

  World(std::unique_ptr<Backend> backend, bool on_gpu, const Sizes& sizes)
      : backend_(std::move(backend)),
        on_gpu_(on_gpu),
        sizes_(sizes),
        slab_(backend_->host_memory(), bytes(sizes.host_rows(), stride()), "slab"),
        engine_(static_cast<unsigned>(sizes.batch + sizes.top_k)),
        versions_(static_cast<std::size_t>(sizes.host_rows()), 0),
        lengths_(static_cast<std::size_t>(sizes.batch)) {
    const auto rows = static_cast<std::size_t>(sizes.host_rows());
    const auto slots = static_cast<std::size_t>(sizes.pool());
    const auto entries = bytes(sizes.rows(), sizes.top_k);
    if (on_gpu_) {
      EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
      backend_->use_stream(reinterpret_cast<std::uintptr_t>(stream_));
    }
    view_.shape = {.index_heads = 1,
                   .index_dim = 16,
                   .query_heads = 1,
                   .latent_dim = 16,
                   .rope_dim = 16,
                   .top_k = sizes.top_k,
                   .row_format = RowFormat::raw,
                   .index_key_format = IndexKeyFormat::fp8};
    backend_->prepare({.shape = view_.shape,
                       .layers = 1,
                       .rows = sizes.rows(),
                       .block_rows = sizes.rows(),
                       .slots = sizes.pool(),
                       .host_rows = sizes.host_rows(),
                       .splits = 1});
    view_.layer = {.pool = array<std::byte>(bytes(sizes.pool(), sizes.row_bytes)),
                   .slab = slab_.device(),
                   .slot_of = array<std::int32_t>(rows),
                   .host_of = array<std::int32_t>(slots),
                   .stamp = array<std::int32_t>(slots),
                   .free_slots = array<std::int32_t>(slots),
                   .index_keys = nullptr,
                   .replacement = array<ReplacementState>(1),
                   .counters = array<LayerCounters>(1, 0),
                   .slots = sizes.pool(),
                   .row_bytes = sizes.row_bytes,
                   .host_rows = sizes.host_rows(),
                   .host_stride = stride(),
                   .index_block_bytes = 0};
    std::vector<std::int32_t> stack(slots);
    std::iota(stack.rbegin(), stack.rend(), 0);
    write(view_.layer.free_slots, stack);
    write(view_.layer.replacement, std::vector<ReplacementState>{{.hand = 0, .free = sizes.pool()}});
    words_.assign(static_cast<std::size_t>(4 + 2 * sizes.rows() + sizes.batch * sizes.table_stride), kNone);
    auto* control = array<std::int32_t>(words_.size());
    view_.step = {.tick = control,
                  .tokens = control + 4,
                  .positions = control + 4,
                  .session = control + 4,
                  .block_table = control + 4 + 2 * sizes.rows(),
                  .rows = sizes.rows(),
                  .query_rows = sizes.query_rows,
                  .table_stride = sizes.table_stride,
                  .owners = array<BlockOwner>(static_cast<std::size_t>(sizes.host_blocks()))};
    view_.row_versions = control + 4 + sizes.rows();
    view_.selection = array<std::int32_t>(entries);
    view_.slots = array<std::int32_t>(entries);
    view_.kth_score = array<float>(static_cast<std::size_t>(sizes.rows()));
    view_.kv = array<std::byte>(bytes(sizes.rows(), sizes.row_bytes));
    view_.versions = array<std::int32_t>(rows, 0);
    view_.row_marks = array<std::int32_t>(rows);
    view_.slot_marks = array<std::int32_t>(slots);
    view_.findings = array<Findings>(1, 0);
    Findings findings{};
    findings.replacement.free = sizes.pool();
    write(view_.findings, std::vector<Findings>{findings});
    scores_ = array<float>(bytes(sizes.rows(), sizes.capacity()));
    std::vector<float> scores(bytes(sizes.rows(), sizes.capacity()));
    constexpr float kOdd[] = {NAN, INFINITY, -INFINITY, 0.0F, -0.0F};
    std::ranges::generate(scores, [&] {
      const auto any = static_cast<std::uint32_t>(engine_() % 200);
      return any < 5 ? kOdd[any] : static_cast<float>(any) - 50.0F;
    });
    write(scores_, scores);
    for (std::int32_t row = 0; row < sizes.host_rows(); ++row) {
      for (std::int32_t word = 0; word < sizes.row_bytes / 4; ++word) {
        const std::uint32_t value = row_word(row, 0, word);
        std::memcpy(row_address(slab_.data(), row, stride()) + 4 * word, &value, 4);
      }
    }
    for (std::int32_t entry = 0; entry < sizes.batch; ++entry) {
      for (std::int32_t index = 0; index < sizes.table_stride; ++index) {
        word(4 + 2 * sizes.rows() + entry * sizes.table_stride + index) = block_of(entry, index);
      }
      restart(entry);
    }
  }
  ~World() {
    backend_->retire();
    buffers_.clear();
    if (stream_ != nullptr) {
      cudaStreamDestroy(stream_);
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::int64_t calls() const { return call_; }
  std::mt19937& engine() { return engine_; }

  /// Begins the next pass. `claims`: its new rows get slots.
  void begin_pass(bool padding, bool claims) {
    tick_ += 1 + kMostOffset + static_cast<std::int32_t>(engine_() % 3);
    word(0) = tick_;
    for (std::int32_t entry = 0; entry < sizes_.batch; ++entry) {
      std::int32_t& length = lengths_[static_cast<std::size_t>(entry)];
      if (length + sizes_.query_rows > sizes_.capacity()) {
        restart(entry);
      }
      const bool pads = padding && engine_() % 8 == 0;
      for (std::int32_t i = 0; i < sizes_.query_rows; ++i) {
        const std::int32_t row = entry * sizes_.query_rows + i;
        word(4 + row) = pads ? kNone : length + i;
        if (!pads) {
          const std::int32_t at = length + i;
          const std::int32_t target = block_of(entry, at / kTokensPerBlock) * kTokensPerBlock + at % kTokensPerBlock;
          word(4 + sizes_.rows() + row) = ++versions_[static_cast<std::size_t>(target)];
        }
      }
      length += pads ? 0 : sizes_.query_rows;
    }
    begin(claims);
  }
  /// The same pass again, in a tick of its own.
  void repeat_pass() {
    word(0) = ++tick_;
    begin(/*claims=*/true);
  }
  /// The pass that was begun fails before anything was written.
  void fail_pass() {
    std::vector<RowRun> runs;
    for (std::int32_t row = 0; row < sizes_.rows(); ++row) {
      if (const std::int32_t position = word(4 + row); position != kNone) {
        const std::int32_t entry = row / sizes_.query_rows;
        const std::int32_t target =
            block_of(entry, position / kTokensPerBlock) * kTokensPerBlock + position % kTokensPerBlock;
        --versions_[static_cast<std::size_t>(target)];
        --lengths_[static_cast<std::size_t>(entry)];
        runs.push_back({.first = target, .count = 1});
      }
    }
    release(runs);
  }
  /// What the pass selects and what its new rows are.
  void draw(Taste taste) {
    const Draw draw{.world = view_, .taste = taste, .seed = ++seed_};
    work(draw, draw.count());
  }

  void append() {
    ++call_;
    backend_->append({.layer = view_.layer,
                      .step = view_.step,
                      .shape = view_.shape,
                      .kv = view_.kv,
                      .kv_dtype = DType::u8,
                      .index_key = nullptr,
                      .index_key_dtype = DType::f32});
    check(Verb::append, tick_);
  }
  void recall(bool appends, bool scored, std::int32_t tick_offset = 0, bool warm = false) {
    ++call_;
    backend_->recall({.layer = view_.layer,
                      .step = view_.step,
                      .block = {.first = 0, .count = sizes_.rows(), .tick_offset = tick_offset},
                      .shape = view_.shape,
                      .selection = view_.selection,
                      .slots = view_.slots,
                      .scores = scored ? scores_ : nullptr,
                      .score_stride = sizes_.capacity(),
                      .kth_score = scored ? view_.kth_score : nullptr,
                      .kv = appends ? view_.kv : nullptr,
                      .kv_dtype = DType::u8});
    check(appends ? Verb::append_and_recall : Verb::recall, tick_ + tick_offset, warm);
  }
  void release(const std::vector<RowRun>& runs) {
    ++call_;
    backend_->release({&view_.layer, 1}, runs);
    check(Verb::release, tick_ + kMostOffset);
  }
  void release_some() {
    std::vector<RowRun> runs(1 + engine_() % 3);
    for (RowRun& run : runs) {  // they may overlap
      run.first = static_cast<std::int32_t>(engine_() % static_cast<unsigned>(sizes_.host_rows()));
      run.count = std::min(static_cast<std::int32_t>(engine_() % 300), sizes_.host_rows() - run.first);
    }
    release(runs);
  }

  /// Whether calls from here on may leave rows without a slot.
  void may_fail(bool may) {
    may_fail_ = may;
    failed_ = failed_ || may;
  }
  void synchronize() { backend_->synchronize(); }

  /// Waits; false, with a failure of the test, if a check did not hold.
  bool whole() {
    backend_->synchronize();
    Findings found{};
    backend_->copy_to_host(&found, view_.findings, sizeof found);
    EXPECT_EQ(found.faults, 0) << name_of(found.fault) << " " << found.index << " in call " << found.call;
    return found.faults == 0;
  }
  /// Compares all host rows with the model on the CPU.
  void check_host_rows() {
    backend_->synchronize();
    for (std::int32_t row = 0; row < sizes_.host_rows(); ++row) {
      for (std::int32_t word = 0; word < sizes_.row_bytes / 4; ++word) {
        const std::uint32_t expected = row_word(row, versions_[static_cast<std::size_t>(row)], word);
        ASSERT_EQ(std::memcmp(row_address(slab_.data(), row, stride()) + 4 * word, &expected, 4), 0)
            << "word " << word << " of row " << row;
      }
    }
  }

 private:
  static std::size_t bytes(std::int64_t count, std::int64_t each) { return static_cast<std::size_t>(count * each); }
  std::int64_t stride() const { return sizes_.row_bytes + 16; }
  std::int32_t& word(std::int32_t index) { return words_[static_cast<std::size_t>(index)]; }

  /// Blocks of a session lie apart, those that are shared at the end.
  std::int32_t block_of(std::int32_t entry, std::int32_t index) const {
    const std::int32_t own = index - sizes_.shared_blocks;
    return own < 0 ? sizes_.host_blocks() + own : own * sizes_.batch + (entry + own) % sizes_.batch;
  }
  /// A session takes another's place; rows of it may stay resident where nobody releases them.
  void restart(std::int32_t entry) {
    const std::int32_t least = sizes_.tight ? sizes_.query_rows * sizes_.top_k : sizes_.prefix();
    const auto room = static_cast<unsigned>(sizes_.capacity() - least - sizes_.query_rows);
    lengths_[static_cast<std::size_t>(entry)] = least + static_cast<std::int32_t>(engine_() % (room + 1));
    if (call_ > 0 && engine_() % 2 == 0) {
      std::vector<RowRun> runs;
      for (std::int32_t index = sizes_.shared_blocks; index < sizes_.table_stride; ++index) {
        runs.push_back({.first = block_of(entry, index) * kTokensPerBlock, .count = kTokensPerBlock});
      }
      release(runs);
    }
  }
  void begin(bool claims) {
    ++call_;
    claims_ = claims;
    backend_->upload_control(const_cast<std::int32_t*>(view_.step.tick), words_.data(), words_.size() * 4);
    work(ForgetNewRows{view_}, 1);
    work(CountNewRows{view_}, sizes_.rows());
    backend_->begin({.step = view_.step,
                     .host_blocks = sizes_.host_blocks(),
                     .layers = {&view_.layer, claims ? std::size_t{1} : std::size_t{0}}});
    check(Verb::begin, tick_);
  }
  void check(Verb verb, std::int32_t now, bool warm = false) {
    const Check check{.world = view_,
                      .verb = verb,
                      .call = static_cast<std::int32_t>(call_),
                      .now = now,
                      .claims = claims_,
                      .may_fail = may_fail_,
                      .failed = failed_};
    work(check, check.count());
    work(Balance{.check = check, .warm = warm, .one_by_one = !on_gpu_}, 1);
  }

  template <typename Work>
  void work(const Work& each, std::int64_t count) {
    if (!on_gpu_) {
      for (std::int64_t i = 0; i < count; ++i) {
        each(i);
      }
      return;
    }
    constexpr std::int64_t kThreads = 256;
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count + kThreads - 1) / kThreads, 1024));
    for_each_index<<<blocks, kThreads, 0, stream_>>>(each, count);
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  }

  /// Device memory, every byte set.
  template <typename T>
  T* array(std::size_t count, int byte = 0xFF) {
    const std::size_t some = std::max(count, std::size_t{1});  // no pointer is null
    const Buffer& buffer = buffers_.emplace_back(backend_->device_memory(), some * sizeof(T), "test array");
    backend_->fill(buffer.data(), byte, buffer.bytes());
    return buffer.data<T>();
  }
  template <typename T>
  void write(T* device, const std::vector<T>& values) {
    backend_->copy_to_device(device, values.data(), values.size() * sizeof(T));
  }

  std::unique_ptr<Backend> backend_;
  bool on_gpu_;
  cudaStream_t stream_ = nullptr;
  Sizes sizes_;
  Buffer slab_;
  std::vector<Buffer> buffers_;
  WorldView view_{};
  float* scores_ = nullptr;
  std::mt19937 engine_;
  std::vector<std::int32_t> versions_;  ///< the model
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> words_;
  std::int32_t tick_ = 0;
  std::uint32_t seed_ = 0;
  std::int64_t call_ = 0;
  bool claims_ = false;
  bool may_fail_ = false;
  bool failed_ = false;
};

}  // namespace echo::residency_test
