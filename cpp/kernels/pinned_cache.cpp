#include "kernels/pinned_cache.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

#include "echo/errors.hpp"
#include "echo/host_memory.hpp"
#include "kernels/cuda_check.hpp"
#include "kernels/device_guard.hpp"
#include "runtime/backends.hpp"

namespace echo {

void give_back(const PinnedRegion& region, int device) noexcept {
  try {
    const DeviceGuard guard(device);
    for (std::size_t done = 0; done < region.bytes; done += kPinnedChunk) {
      ECHO_CUDA_WARN(cudaHostUnregister(region.begin + done));
    }
  } catch (const CudaError&) {
    // The driver is gone, and with it the registration.
  }
  munmap(region.begin, region.bytes);
}

PinnedCache& PinnedCache::instance() {
  static auto* const cache = new PinnedCache;
  return *cache;
}

void PinnedCache::keep(bool on) {
  {
    const std::lock_guard lock(mutex_);
    keeps_ = on;
  }
  if (!on) {
    clear();
  }
}

bool PinnedCache::put(const PinnedRegion& region, int device) noexcept {
  const std::lock_guard lock(mutex_);
  if (!keeps_) {
    return false;
  }
  try {
    kept_.push_back({region, device});
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

std::optional<PinnedRegion> PinnedCache::take(std::size_t bytes, int device) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(kept_.begin(), kept_.end(),
                                  [&](const Kept& one) { return one.region.bytes == bytes && one.device == device; });
  if (found == kept_.end()) {
    return std::nullopt;
  }
  const PinnedRegion region = found->region;
  kept_.erase(found);
  return region;
}

void PinnedCache::clear() noexcept {
  std::vector<Kept> gone;
  {
    const std::lock_guard lock(mutex_);
    gone.swap(kept_);
  }
  for (const Kept& one : gone) {
    give_back(one.region, one.device);
  }
}

std::size_t PinnedCache::bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const Kept& one : kept_) {
    sum += one.region.bytes;
  }
  return sum;
}

void keep_host_memory(bool on) { PinnedCache::instance().keep(on); }

std::size_t kept_host_bytes() { return PinnedCache::instance().bytes(); }

}  // namespace echo
