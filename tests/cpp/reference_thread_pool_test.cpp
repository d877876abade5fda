#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "echo/errors.hpp"
#include "reference/thread_pool.hpp"

namespace echo {
namespace {

TEST(ThreadPool, CoversEveryIterationOnce) {
  for (const std::int64_t threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::int64_t n : {0, 1, 2, 3, 7, 31, 32, 33, 1000}) {
      std::vector<std::atomic<int>> times(static_cast<std::size_t>(n));
      pool.parallel_for(n, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          ++times[static_cast<std::size_t>(i)];
        }
      });
      for (const auto& count : times) {
        EXPECT_EQ(count, 1);
      }
    }
  }
}

TEST(ThreadPool, OneThreadRunsInline) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  pool.parallel_for(100, [&](std::int64_t, std::int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
}

TEST(ThreadPool, AChildOfForkDoesAllByItself) {
  auto pool = std::make_unique<ThreadPool>(4);
  pool->parallel_for(1000, [](std::int64_t, std::int64_t) {});  // now threads wait for the next loop
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // rather than wait for ever
    std::int64_t done = 0;
    for (int round = 0; round < 3; ++round) {
      pool->parallel_for(1000, [&](std::int64_t begin, std::int64_t end) { done += end - begin; });
    }
    pool.reset();
    _exit(done == 3000 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::atomic<std::int64_t> done = 0;
  pool->parallel_for(1000, [&](std::int64_t begin, std::int64_t end) { done += end - begin; });
  EXPECT_EQ(done, 1000);
}

TEST(ThreadPool, ExceptionsReachTheCallerAndThePoolGoesOn) {
  ThreadPool pool(4);
  for (int round = 0; round < 200; ++round) {
    EXPECT_THROW(pool.parallel_for(64,
                                   [&](std::int64_t, std::int64_t end) {
                                     if (end > round % 64) {
                                       throw std::runtime_error("piece");
                                     }
                                   }),
                 std::runtime_error);
    std::atomic<std::int64_t> sum = 0;
    pool.parallel_for(64, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 64);
  }
}

TEST(ThreadPool, ManyShortLoops) {
  ThreadPool pool(4);
  std::atomic<std::int64_t> sum = 0;
  for (int round = 0; round < 5000; ++round) {
    pool.parallel_for(3, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
  }
  EXPECT_EQ(sum, 15000);
}

TEST(ThreadPool, RefusesImpossibleCounts) {
  EXPECT_THROW(ThreadPool(-1), InvalidArgument);
  EXPECT_THROW(ThreadPool(1 << 20), InvalidArgument);
  EXPECT_GE(ThreadPool(0).threads(), 1);
}

}  // namespace
}  // namespace echo
