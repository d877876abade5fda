#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace echo {

/// Threads that live as long as the pool and work on one loop at a time. The caller takes part, so
/// a pool of one has no threads of its own. Loops must not be nested, and only one thread may call. In a
/// child of fork(), which has no threads but the one that forked, that one does all.
class ThreadPool {
 public:
  /// Work on iterations [begin, end).
  using Piece = std::function<void(std::int64_t begin, std::int64_t end)>;

  /// `threads` 0 means one per core. Throws InvalidArgument naming `threads`, CapacityError if the
  /// system refuses.
  explicit ThreadPool(std::int64_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::int64_t threads() const { return static_cast<std::int64_t>(workers_.size()) + 1; }

  /// Calls `piece` for pieces that cover [0, n) once, in any order and on any thread, and returns
  /// when all are done. If a piece throws, no new ones start and the first exception is rethrown
  /// here.
  void parallel_for(std::int64_t n, const Piece& piece);

 private:
  /// On the heap: a child can neither lock nor destroy what threads of its parent waited for.
  struct Meeting {
    std::mutex mutex;
    std::condition_variable wake;
    std::condition_variable finished;
  };

  bool in_child() const;
  void wait_for_work();
  void take_pieces();
  void stop() noexcept;

  std::vector<std::thread> workers_;
  std::unique_ptr<Meeting> meeting_ = std::make_unique<Meeting>();
  pid_t process_;             ///< that has the workers
  std::int64_t invited_ = 0;  ///< workers that may still join the loop
  std::int64_t joined_ = 0;   ///< workers inside the loop
  bool stopping_ = false;
  std::exception_ptr error_;

  // The loop. Written by the caller before workers are invited.
  const Piece* piece_ = nullptr;
  std::int64_t n_ = 0;
  std::int64_t piece_length_ = 1;
  std::atomic<std::int64_t> next_{0};
};

}  // namespace echo
