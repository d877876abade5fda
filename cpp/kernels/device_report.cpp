#include "echo/device_report.hpp"

#include <algorithm>
#include <chrono>
#include <memory>

#include "echo/errors.hpp"
#include "kernels/cuda_check.hpp"
#include "kernels/cuda_handles.hpp"
#include "kernels/device_code.hpp"
#include "kernels/device_guard.hpp"
#include "kernels/device_memory.hpp"
#include "kernels/numa.hpp"
#include "kernels/pinned_memory.hpp"
#include "runtime/host_memory_limit.hpp"

namespace echo {
namespace {

constexpr std::size_t kProbeBytes = std::size_t{256} << 20;
constexpr int kCopies = 5;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The fastest of a few copies, in 10^9 bytes per second.
double copy_speed(void* to, const void* from, cudaMemcpyKind kind, const Stream& stream) {
  double best = 0.0;
  for (int i = 0; i < kCopies; ++i) {
    const auto start = std::chrono::steady_clock::now();
    ECHO_CUDA_CHECK(cudaMemcpyAsync(to, from, kProbeBytes, kind, stream.get()));
    ECHO_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
    best = std::max(best, static_cast<double>(kProbeBytes) / seconds_since(start) / 1e9);
  }
  return best;
}

void measure(int device, DeviceReport& report) {
  const DeviceGuard guard(device);
  cudaDeviceProp properties{};
  ECHO_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  report.name = properties.name;
  report.compute_capability = properties.major * 10 + properties.minor;
  report.multiprocessors = properties.multiProcessorCount;
  report.numa_node = numa_node_of_device(device);
  std::size_t free = 0;
  std::size_t total = 0;
  ECHO_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  report.memory_bytes = static_cast<std::int64_t>(total);
  report.free_bytes = static_cast<std::int64_t>(free);
  require_device_code(device);

  PinnedMemory pinned(device);
  DeviceMemory memory(device);
  const auto start = std::chrono::steady_clock::now();
  const Buffer host(pinned, kProbeBytes, "the probe of pinned memory");
  report.pin_gib_per_second = static_cast<double>(kProbeBytes) / seconds_since(start) / (1 << 30);
  const Buffer on_device(memory, kProbeBytes, "the probe of device memory");
  const Stream stream;
  report.to_device_gb_per_second = copy_speed(on_device.data(), host.data(), cudaMemcpyHostToDevice, stream);
  report.to_host_gb_per_second = copy_speed(host.data(), on_device.data(), cudaMemcpyDeviceToHost, stream);
}

}  // namespace

DeviceReport device_report(int device) {
  DeviceReport report;
  const auto pinnable = static_cast<double>(host_memory_limit());
  report.pinned_limit_bytes = static_cast<std::int64_t>(std::min(pinnable, 9e18));
  static_cast<void>(cudaDriverGetVersion(&report.driver_version));
  static_cast<void>(cudaRuntimeGetVersion(&report.runtime_version));
  if (const cudaError_t error = cudaGetDeviceCount(&report.devices); error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    report.devices = 0;
    report.problem = report.driver_version == 0
                         ? "no NVIDIA driver is loaded"
                         : std::string("CUDA finds no usable device: ") + cudaGetErrorString(error);
    return report;
  }
  if (device < 0 || device >= report.devices) {
    report.problem = "there is no device " + std::to_string(device) + ", only " + std::to_string(report.devices);
    return report;
  }
  try {
    measure(device, report);
  } catch (const Error& error) {
    report.problem = error.what();
  }
  return report;
}

}  // namespace echo
