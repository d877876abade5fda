#include "reference/memory_resource.hpp"

#include <cstdint>
#include <cstdlib>

#include "echo/errors.hpp"

namespace echo {
namespace {
constexpr std::size_t kAlignment = 256;
}

void* PlainMemory::allocate(std::size_t bytes, const std::string& what) {
  void* pointer = nullptr;
  if (bytes <= static_cast<std::size_t>(PTRDIFF_MAX) - kAlignment) {
    pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  if (pointer == nullptr) {
    throw CapacityError(what + ": " + std::to_string(bytes) + " bytes of host memory could not be had");
  }
  return pointer;
}

void PlainMemory::deallocate(void* pointer, std::size_t /*bytes*/) noexcept { std::free(pointer); }

}  // namespace echo
