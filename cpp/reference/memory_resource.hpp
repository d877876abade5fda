#pragma once

#include <cstddef>
#include <string>

#include "runtime/memory.hpp"

namespace echo {

/// Plain host memory: both the "device" and the "host" memory of the CPU backend.
class PlainMemory final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, const std::string& what) override;
  void deallocate(void* pointer, std::size_t bytes) noexcept override;
  void* device_alias(void* pointer) override { return pointer; }
};

}  // namespace echo
