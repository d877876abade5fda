#pragma once
// Arrays in a backend's device memory, and floats to put there.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "runtime/backend.hpp"

namespace echo::cuda_test {

/// An array in a backend's device memory.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(Backend& backend, const std::vector<T>& values)
      : backend_(&backend), buffer_(backend.device_memory(), values.size() * sizeof(T), "test array") {
    write(values);
  }

  T* data() const { return buffer_.template data<T>(); }
  std::size_t size() const { return buffer_.bytes() / sizeof(T); }
  void write(const std::vector<T>& values) {
    backend_->copy_to_device(buffer_.data(), values.data(), values.size() * sizeof(T));
  }
  std::vector<T> read() const {
    std::vector<T> values(size());
    backend_->copy_to_host(values.data(), buffer_.data(), buffer_.bytes());
    return values;
  }

 private:
  Backend* backend_;
  Buffer buffer_;
};

inline std::vector<float> normal_floats(std::size_t count, unsigned seed, float spread = 1.0F) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> values(count);
  std::ranges::generate(values, [&] { return normal(engine); });
  return values;
}

/// Bit patterns of every kind: zeros, subnormals, ordinary and huge values, infinities, NaN.
inline std::vector<float> wild_floats(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<float> values = normal_floats(count, seed);
  for (float& value : values) {
    const auto kind = static_cast<std::uint32_t>(engine() % 16U);
    if (kind < 4) {
      const auto any = static_cast<std::uint32_t>(engine());
      const std::uint32_t bits = kind == 0 ? any : (any & 0x80000000U) | (any % 8U) << 20;
      std::memcpy(&value, &bits, sizeof value);
    } else if (kind == 4) {
      value = std::ldexp(value, static_cast<int>(engine() % 40) - 20);
    }
  }
  return values;
}

inline std::vector<std::uint16_t> upper_halves(const std::vector<float>& values) {
  std::vector<std::uint16_t> halves;
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    halves.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  return halves;
}

}  // namespace echo::cuda_test
