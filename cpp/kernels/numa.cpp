#include "kernels/numa.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/cuda_check.hpp"

namespace echo {

int numa_node_of_device(int device) {
  std::error_code unreadable;
  if (!std::filesystem::exists("/sys/devices/system/node/node1", unreadable)) {
    return -1;
  }
  std::array<char, 32> bus_id{};
  if (cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return -1;
  }
  std::string id = bus_id.data();
  std::transform(id.begin(), id.end(), id.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream file("/sys/bus/pci/devices/" + id + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

void prefer_numa_node(void* address, std::size_t bytes, int node) noexcept {
  // The system call itself: libnuma would be one more dependency for one line.
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr int kBits = 8 * static_cast<int>(sizeof(unsigned long));
  std::array<unsigned long, 16> mask{};
  if (node < 0 || node >= kBits * static_cast<int>(mask.size())) {
    return;
  }
  mask[static_cast<std::size_t>(node / kBits)] = 1UL << (node % kBits);
  static_cast<void>(syscall(SYS_mbind, address, bytes, kPreferred, mask.data(),
                            static_cast<unsigned long>(kBits) * mask.size() + 1, 0U));
}

}  // namespace echo
