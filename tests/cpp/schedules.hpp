#pragma once
// Runs a few threads of control one memory access at a time, in every order that switches between them at most so many
// times without need. Each thread is a context of its own (ucontext) on one thread of the CPU, so runs are exact
// repetitions. Cost: about 0.3 us per access; n accesses and s switches give about n^s / s! orders.

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace echo::residency_test {

class Schedules {
 public:
  static constexpr std::size_t kMostThreads = 4;
  using Threads = std::vector<std::function<void()>>;

  explicit Schedules(int switches) : switches_(switches) {}

  /// Runs `make`'s threads in all those orders, each time made anew. After each run `check` says what is wrong, empty
  /// for nothing. Returns the first fault, with the order in which the threads ran.
  std::string explore(const std::function<Threads()>& make, const std::function<std::string()>& check) {
    runs_ = 0;
    choices_.clear();
    do {
      ++runs_;
      if (!run(make())) {
        return "nobody can go on: " + order_;
      }
      if (const std::string fault = check(); !fault.empty()) {
        return fault + ": " + order_;
      }
    } while (next());
    return {};
  }
  std::int64_t runs() const { return runs_; }

  // Called by the threads before each access to a word that they share: before a load, before anything else.
  static void before_load(const void* word) {
    current_->threads_[current_->running_].next_load = word;
    current_->switch_to_scheduler();
  }
  static void before_change() { before_load(nullptr); }
  /// Called behind an access that changed a word.
  static void changed() { ++current_->version_; }

 private:
  static constexpr std::size_t kStackBytes = 64 << 10;
  static constexpr int kMostIdle = 1000;

  struct Seen {
    const void* word;
    std::int64_t version;
  };
  struct Thread {
    ucontext_t context{};
    std::unique_ptr<std::byte[]> stack = std::make_unique<std::byte[]>(kStackBytes);
    std::function<void()> body;
    bool finished = true;
    const void* next_load = nullptr;  ///< what it is about to read, null if it is about to do something else
    std::vector<Seen> loads;

    /// Whether it is about to read a word again although nothing has changed since it last did: it waits for somebody.
    bool idle(std::int64_t version) const {
      return next_load != nullptr && std::ranges::any_of(loads, [&](const Seen& one) {
               return one.word == next_load && one.version == version;
             });
    }
    void note(std::int64_t version) {
      if (next_load != nullptr) {
        std::erase_if(loads, [&](const Seen& one) { return one.word == next_load; });
        loads.push_back({.word = next_load, .version = version});
      }
    }
  };
  struct Choice {
    std::size_t taken;
    std::size_t count;
  };

  static void enter() {
    Schedules& self = *current_;
    Thread& own = self.threads_[self.running_];
    own.body();
    own.finished = true;
    self.switch_to_scheduler();
  }
  void switch_to_scheduler() { swapcontext(&threads_[running_].context, &scheduler_); }

  /// One of `count`: what is to be taken this time.
  std::size_t choose(std::size_t count) {
    if (count == 1) {
      return 0;
    }
    if (depth_ == choices_.size()) {
      choices_.push_back({.taken = 0, .count = count});
    }
    return choices_[depth_++].taken;
  }
  /// Moves on to the next order; false behind the last.
  bool next() {
    while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().count) {
      choices_.pop_back();
    }
    if (choices_.empty()) {
      return false;
    }
    ++choices_.back().taken;
    return true;
  }

  /// False if the threads wait for each other.
  bool run(Threads bodies) {
    current_ = this;
    count_ = bodies.size();
    depth_ = 0;
    version_ = 0;
    order_.clear();
    for (std::size_t i = 0; i < count_; ++i) {
      Thread& thread = threads_[i];
      thread.body = std::move(bodies[i]);
      thread.finished = false;
      thread.next_load = nullptr;
      thread.loads.clear();
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      makecontext(&thread.context, &Schedules::enter, 0);
    }
    running_ = count_;
    int left = switches_;
    int idle = 0;
    for (;;) {
      std::array<std::size_t, kMostThreads> ready{};
      const std::size_t busy = candidates(ready, /*idle=*/false);
      const std::size_t count = busy > 0 ? busy : candidates(ready, /*idle=*/true);
      if (count == 0) {
        return true;
      }
      idle = busy > 0 ? 0 : idle + 1;
      if (idle > kMostIdle) {
        return false;
      }
      const bool needed = ready[0] != running_;  // the one that ran goes on first, unless it cannot
      const std::size_t in_turn = needed || count == 1 ? 0 : 1;
      const std::size_t taken = busy == 0 ? in_turn : choose(needed || left > 0 ? count : 1);
      left -= busy > 0 && !needed && taken > 0 ? 1 : 0;
      running_ = ready[taken];
      order_ += static_cast<char>('A' + running_);
      threads_[running_].note(version_);
      swapcontext(&scheduler_, &threads_[running_].context);
    }
  }

  /// Threads that are not finished, the one that ran last first.
  std::size_t candidates(std::array<std::size_t, kMostThreads>& ready, bool idle) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      const std::size_t thread = running_ == count_ ? i : (running_ + i) % count_;
      if (!threads_[thread].finished && threads_[thread].idle(version_) == idle) {
        ready[count++] = thread;
      }
    }
    return count;
  }

  static inline Schedules* current_ = nullptr;
  int switches_;
  std::array<Thread, kMostThreads> threads_;
  ucontext_t scheduler_{};
  std::size_t count_ = 0;
  std::size_t running_ = 0;
  std::int64_t version_ = 0;
  std::vector<Choice> choices_;
  std::size_t depth_ = 0;
  std::int64_t runs_ = 0;
  std::string order_;
};

}  // namespace echo::residency_test
