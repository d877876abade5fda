#pragma once

#include <string>

#include "runtime/memory.hpp"

namespace echo {

/// Memory of one GPU, one cudaMalloc per allocation: everything is taken once, at construction.
class DeviceMemory final : public MemoryResource {
 public:
  explicit DeviceMemory(int device) : device_(device) {}

  void* allocate(std::size_t bytes, const std::string& what) override;
  void deallocate(void* pointer, std::size_t bytes) noexcept override;
  void* device_alias(void* pointer) override { return pointer; }

 private:
  int device_;
};

}  // namespace echo
