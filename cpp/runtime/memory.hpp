#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace echo {

/// Where memory comes from: plain host memory, pinned host memory, device memory.
class MemoryResource {
 public:
  MemoryResource() = default;
  virtual ~MemoryResource() = default;
  MemoryResource(const MemoryResource&) = delete;
  MemoryResource& operator=(const MemoryResource&) = delete;

  /// At least 256-byte aligned; contents undefined. Throws CapacityError naming what and how much.
  virtual void* allocate(std::size_t bytes, const std::string& what) = 0;
  virtual void deallocate(void* pointer, std::size_t bytes) noexcept = 0;
  /// The address under which kernels see this memory.
  virtual void* device_alias(void* pointer) = 0;
};

/// Owns one piece of memory of a resource, which must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(MemoryResource& resource, std::size_t bytes, const std::string& what)
      : resource_(&resource), bytes_(bytes), data_(bytes == 0 ? nullptr : resource.allocate(bytes, what)) {}
  Buffer(Buffer&& other) noexcept
      : resource_(std::exchange(other.resource_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) {
      resource_->deallocate(data_, bytes_);
    }
  }

  std::size_t bytes() const { return bytes_; }
  template <typename T = std::byte>
  T* data() const {
    return static_cast<T*>(data_);
  }
  /// Address for kernels.
  template <typename T = std::byte>
  T* device() const {
    return data_ == nullptr ? nullptr : static_cast<T*>(resource_->device_alias(data_));
  }

 private:
  MemoryResource* resource_ = nullptr;
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
};

}  // namespace echo
