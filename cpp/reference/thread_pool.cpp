#include "reference/thread_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "echo/errors.hpp"

namespace echo {
namespace {
constexpr std::int64_t kMaxThreads = 4096;
/// More pieces than threads, so that uneven pieces even out.
constexpr std::int64_t kPiecesPerThread = 8;
}  // namespace

ThreadPool::ThreadPool(std::int64_t threads) : process_(getpid()) {
  if (threads < 0 || threads > kMaxThreads) {
    throw InvalidArgument("threads: " + std::to_string(threads) + " given, expected 0 to " +
                          std::to_string(kMaxThreads));
  }
  if (threads == 0) {
    threads = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
  }
  try {
    for (std::int64_t i = 1; i < threads; ++i) {
      workers_.emplace_back([this] { wait_for_work(); });
    }
  } catch (const std::system_error& error) {
    const std::string started = std::to_string(workers_.size() + 1);
    stop();
    throw CapacityError("threads: " + std::to_string(threads) + " asked for, only " + started + " could be had (" +
                        error.what() + ")");
  }
}

ThreadPool::~ThreadPool() { stop(); }

bool ThreadPool::in_child() const { return getpid() != process_; }

void ThreadPool::stop() noexcept {
  if (in_child()) {
    for (std::thread& worker : workers_) {
      worker.detach();
    }
    static_cast<void>(meeting_.release());
    return;
  }
  {
    const std::lock_guard lock(meeting_->mutex);
    stopping_ = true;
  }
  meeting_->wake.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void ThreadPool::parallel_for(std::int64_t n, const Piece& piece) {
  if (n <= 0) {
    return;
  }
  const std::int64_t length = std::max<std::int64_t>(1, n / (threads() * kPiecesPerThread));
  const std::int64_t helpers = std::min(threads(), (n + length - 1) / length) - 1;
  if (helpers == 0 || in_child()) {
    piece(0, n);
    return;
  }
  {
    const std::lock_guard lock(meeting_->mutex);
    piece_ = &piece;
    n_ = n;
    piece_length_ = length;
    next_.store(0, std::memory_order_relaxed);
    error_ = nullptr;
    invited_ = helpers;
  }
  for (std::int64_t i = 0; i < helpers; ++i) {
    meeting_->wake.notify_one();
  }
  take_pieces();
  std::unique_lock lock(meeting_->mutex);
  invited_ = 0;  // who has not woken up yet has nothing to do
  meeting_->finished.wait(lock, [this] { return joined_ == 0; });
  if (error_ != nullptr) {
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void ThreadPool::wait_for_work() {
  std::unique_lock lock(meeting_->mutex);
  for (;;) {
    meeting_->wake.wait(lock, [this] { return stopping_ || invited_ > 0; });
    if (stopping_) {
      return;
    }
    --invited_;
    ++joined_;
    lock.unlock();
    take_pieces();
    lock.lock();
    if (--joined_ == 0) {
      meeting_->finished.notify_one();
    }
  }
}

void ThreadPool::take_pieces() {
  try {
    for (;;) {
      const std::int64_t begin = next_.fetch_add(piece_length_, std::memory_order_relaxed);
      if (begin >= n_) {
        return;
      }
      (*piece_)(begin, std::min(n_, begin + piece_length_));
    }
  } catch (...) {
    next_.store(n_, std::memory_order_relaxed);
    const std::lock_guard lock(meeting_->mutex);
    if (error_ == nullptr) {
      error_ = std::current_exception();
    }
  }
}

}  // namespace echo
