#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "kernels/pinned_cache.hpp"
#include "runtime/memory.hpp"

namespace echo {

/// Host memory that kernels read and write directly: anonymous pages (huge where possible, near the
/// GPU), touched by all cores, then registered with CUDA in chunks. An allocation takes its bytes
/// rounded up to pages, nothing more; one that fails leaves nothing behind. What keep_host_memory kept is taken first.
class PinnedMemory final : public MemoryResource {
 public:
  explicit PinnedMemory(int device);

  /// Throws CapacityError before touching memory if the bytes exceed host_memory_limit().
  void* allocate(std::size_t bytes, const std::string& what) override;
  void deallocate(void* pointer, std::size_t bytes) noexcept override;
  void* device_alias(void* pointer) override;

  /// How many of `bytes` from `pointer` on one CUDA copy may cover: copies must not cross chunks.
  /// All of them for memory that is not from here.
  std::size_t copyable(const void* pointer, std::size_t bytes) const;

 private:
  /// Takes charge of a registered region, also by giving it back if that fails.
  void* own(PinnedRegion region);
  /// The region that holds an address; end() if none does.
  std::map<std::byte*, PinnedRegion>::const_iterator find(const void* pointer) const;

  int device_;
  int node_;
  std::map<std::byte*, PinnedRegion> regions_;
};

}  // namespace echo
