#include "kernels/pinned_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <system_error>
#include <thread>
#include <vector>

#include "echo/errors.hpp"
#include "kernels/chunks.hpp"
#include "kernels/device_guard.hpp"
#include "kernels/numa.hpp"
#include "runtime/host_memory_limit.hpp"

namespace echo {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::string asked(const std::string& what, std::size_t bytes) {
  return what + ": " + std::to_string(bytes) + " bytes of pinned host memory asked";
}

/// `bytes` of untouched memory that begins at a huge page. Reserves nothing: how much the kernel
/// would let a process promise itself says little about how much there is.
std::byte* map_pages(std::size_t bytes, const std::string& what) {
  const std::size_t mapped = bytes + kHugePage;
  void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw CapacityError(asked(what, bytes) + ", mapping them failed: " + std::strerror(errno));
  }
  auto* begin = static_cast<std::byte*>(address);
  const std::size_t head =
      round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage) - reinterpret_cast<std::uintptr_t>(begin);
  if (head != 0) {
    munmap(begin, head);
  }
  munmap(begin + head + bytes, mapped - head - bytes);
  madvise(begin + head, bytes, MADV_HUGEPAGE);  // without it everything works, slower
  return begin + head;
}

/// Has all cores fault in the pages: with one, this would be most of the time that pinning takes.
void touch(std::byte* begin, std::size_t bytes) {
  const std::size_t page = page_bytes();
  const std::size_t pieces = (bytes + kHugePage - 1) / kHugePage;
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t piece = next++; piece < pieces; piece = next++) {
      const std::size_t end = std::min(bytes, (piece + 1) * kHugePage);
      for (std::size_t at = piece * kHugePage; at < end; at += page) {
        *const_cast<volatile std::byte*>(begin + at) = std::byte{0};
      }
    }
  };
  std::vector<std::jthread> helpers;
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  try {
    while (helpers.size() + 1 < std::min(cores, pieces)) {
      helpers.emplace_back(work);
    }
  } catch (const std::system_error&) {
    // No more threads to be had; those there are will do.
  }
  work();
}

/// Registers all chunks, or none: then says how far it came.
void register_chunks(std::byte* begin, std::size_t bytes, const std::string& what) {
  cudaError_t error = cudaSuccess;
  const auto add = [&](std::byte* chunk, std::size_t chunk_bytes) {
    error = cudaHostRegister(chunk, chunk_bytes, cudaHostRegisterMapped);
    return error == cudaSuccess;
  };
  const auto remove = [](std::byte* chunk) { ECHO_CUDA_WARN(cudaHostUnregister(chunk)); };
  if (const std::size_t done = take_in_chunks(begin, bytes, kPinnedChunk, add, remove); done < bytes) {
    static_cast<void>(cudaGetLastError());
    throw CapacityError(asked(what, bytes) + ", " + std::to_string(done) + " could be registered, then: " +
                        cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + "); all was given back");
  }
}

/// Address under which kernels see the region; checks that its chunks follow each other there too.
std::byte* alias_of(std::byte* begin, std::size_t bytes) {
  std::byte* alias = nullptr;
  for (std::size_t done = 0; done < bytes; done += kPinnedChunk) {
    void* chunk = nullptr;
    ECHO_CUDA_CHECK(cudaHostGetDevicePointer(&chunk, begin + done, 0));
    if (done == 0) {
      alias = static_cast<std::byte*>(chunk);
    } else if (chunk != alias + done) {
      throw NotSupported("device: registered host memory is not contiguous in its address space");
    }
  }
  return alias;
}

}  // namespace

PinnedMemory::PinnedMemory(int device) : device_(device), node_(numa_node_of_device(device)) {}

void* PinnedMemory::allocate(std::size_t bytes, const std::string& what) {
  const DeviceGuard guard(device_);
  const std::size_t rounded = round_up(bytes, page_bytes());
  if (const auto kept = PinnedCache::instance().take(rounded, device_)) {
    return own(*kept);
  }
  if (rounded > host_memory_limit()) {
    PinnedCache::instance().clear();
  }
  if (const std::size_t limit = host_memory_limit(); rounded > limit) {
    throw CapacityError(asked(what, rounded) + ", " + std::to_string(limit) + " are available");
  }
  std::byte* begin = map_pages(rounded, what);
  try {
    prefer_numa_node(begin, rounded, node_);
    touch(begin, rounded);
    register_chunks(begin, rounded, what);
  } catch (...) {
    munmap(begin, rounded);
    throw;
  }
  return own({.begin = begin, .bytes = rounded, .alias = nullptr});
}

void* PinnedMemory::own(PinnedRegion region) {
  try {
    if (region.alias == nullptr) {
      region.alias = alias_of(region.begin, region.bytes);
    }
    regions_.emplace(region.begin, region);
  } catch (...) {
    give_back(region, device_);
    throw;
  }
  return region.begin;
}

void PinnedMemory::deallocate(void* pointer, std::size_t /*bytes*/) noexcept {
  const auto found = regions_.find(static_cast<std::byte*>(pointer));
  if (found == regions_.end()) {
    return;
  }
  if (!PinnedCache::instance().put(found->second, device_)) {
    give_back(found->second, device_);
  }
  regions_.erase(found);
}

std::map<std::byte*, PinnedRegion>::const_iterator PinnedMemory::find(const void* pointer) const {
  auto* address = static_cast<std::byte*>(const_cast<void*>(pointer));
  const auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) {
    return regions_.end();
  }
  const auto found = std::prev(after);
  return address < found->first + found->second.bytes ? found : regions_.end();
}

void* PinnedMemory::device_alias(void* pointer) {
  const auto found = find(pointer);
  if (found == regions_.end()) {
    throw InvalidArgument("pointer: it is not from this memory resource");
  }
  return found->second.alias + (static_cast<std::byte*>(pointer) - found->first);
}

std::size_t PinnedMemory::copyable(const void* pointer, std::size_t bytes) const {
  const auto found = find(pointer);
  if (found == regions_.end()) {
    return bytes;
  }
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - found->first);
  return std::min(bytes, kPinnedChunk - offset % kPinnedChunk);
}

}  // namespace echo
