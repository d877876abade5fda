// The C API, for ctypes: functions return 0, or -1 and echo_bench_error() says why.

#include <cstdint>
#include <optional>

#include "bench_case.hpp"
#include "guarded.hpp"
#include "host_rows.hpp"
#include "recall_case.hpp"
#include "runtime/backends.hpp"
#include "step_case.hpp"

#define ECHO_BENCH_API extern "C" __attribute__((visibility("default")))

using echo::bench::EchoBenchCase;
using echo::bench::EchoStepCase;
using echo::bench::EchoStepReplay;
using echo::bench::EchoStepResult;
using echo::bench::error_text;
using echo::bench::guarded;
using echo::bench::HostRows;
using echo::bench::Kind;
using echo::bench::RecallCase;
using echo::bench::StepCase;

struct EchoBench {
  explicit EchoBench(std::int64_t host_bytes) : host(host_bytes) {}

  HostRows host;
  std::optional<RecallCase> recall;
  std::optional<StepCase> step;
};

ECHO_BENCH_API int echo_bench_devices() { return echo::cuda_device_count(); }
ECHO_BENCH_API const char* echo_bench_error() { return error_text().c_str(); }

/// Pins the host pool that all cases share. Null on failure.
ECHO_BENCH_API EchoBench* echo_bench_open(std::int64_t host_bytes) {
  EchoBench* bench = nullptr;
  guarded([&] { bench = new EchoBench(host_bytes); });
  return bench;
}
ECHO_BENCH_API void echo_bench_close(EchoBench* bench) { delete bench; }

/// Sets a case up; there is one at a time.
ECHO_BENCH_API int echo_bench_create(EchoBench* bench, const EchoBenchCase* sizes) {
  return guarded([&] {
    bench->recall.reset();
    bench->recall.emplace(*sizes, bench->host);
  });
}
ECHO_BENCH_API int echo_bench_destroy(EchoBench* bench) {
  return guarded([&] { bench->recall.reset(); });
}

ECHO_BENCH_API int echo_bench_replay(EchoBench* bench, std::int32_t kind, std::int32_t blocks, double* microseconds) {
  return guarded([&] { *microseconds = bench->recall.value().replay(static_cast<Kind>(kind), blocks); });
}
ECHO_BENCH_API int echo_bench_nodes(EchoBench* bench, std::int32_t kind, std::int32_t* nodes) {
  return guarded([&] { *nodes = bench->recall.value().nodes(static_cast<Kind>(kind)); });
}
ECHO_BENCH_API int echo_bench_verify(EchoBench* bench) {
  return guarded([&] { bench->recall.value().verify(); });
}

/// The same for decode steps.
ECHO_BENCH_API int echo_bench_step_create(EchoBench* bench, const EchoStepCase* sizes) {
  return guarded([&] {
    bench->step.reset();
    bench->step.emplace(*sizes, bench->host);
  });
}
ECHO_BENCH_API int echo_bench_step_destroy(EchoBench* bench) {
  return guarded([&] { bench->step.reset(); });
}
ECHO_BENCH_API int echo_bench_step_replay(EchoBench* bench, const EchoStepReplay* what, EchoStepResult* result) {
  return guarded([&] { *result = bench->step.value().replay(*what); });
}
ECHO_BENCH_API int echo_bench_step_verify(EchoBench* bench) {
  return guarded([&] { bench->step.value().verify(); });
}
