#pragma once

#include <memory>
#include <string>

#include "echo/planner.hpp"
#include "echo/runtime_config.hpp"
#include "runtime/backend.hpp"

namespace echo {

/// The CPU backend: always linked. `threads` 0 means one per core.
std::unique_ptr<Backend> make_cpu_backend(std::int64_t threads);

// The CUDA backend, or its stand-in in builds without CUDA (kernels/none), which has 0 devices.

/// Devices that can be used now; never throws, 0 without a driver.
int cuda_device_count() noexcept;
std::unique_ptr<Backend> make_cuda_backend(int device, const RuntimeConfig& config);
/// Whether kernels made for the GPU's architecture are asked for. Throws InvalidArgument naming `kernels`.
bool wants_own_kernels(const RuntimeConfig& config);
/// Free memory of the device in bytes.
std::int64_t cuda_free_bytes(int device);
/// Host memory that keep_host_memory keeps for the next runtime.
std::size_t kept_host_bytes();
/// Device memory that the CUDA backend's prepare(sizes) takes; 0 in builds without CUDA.
std::size_t cuda_scratch_bytes(const ScratchSizes& sizes);

/// What a backend is prepared for under a plan.
ScratchSizes scratch_sizes(const Plan& plan);

/// Throws InvalidArgument naming `device` unless it is "auto", "cpu", "cuda" or "cuda:N"; it need not be there.
void require_device_name(const std::string& device);
/// Turns "auto", "cpu", "cuda", "cuda:1" into "cpu" or "cuda:N". Throws InvalidArgument naming `device`, or
/// NotSupported where the device is not there, with the reason.
std::string resolve_device(const std::string& device);
std::unique_ptr<Backend> make_backend(const std::string& resolved, const RuntimeConfig& config);

}  // namespace echo
