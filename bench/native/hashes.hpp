#pragma once
// Everything random here is a hash of what it belongs to: bytes can be checked without a copy of them, and the CPU
// agrees with the GPU.

#include <cstdint>

#include "cache_manager/address.hpp"
#include "kernels/number_formats.hpp"

namespace echo::bench {

/// A bijection of 32-bit words that leaves no pattern.
ECHO_HOST_DEVICE std::uint32_t hash(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352DU;
  x = (x ^ (x >> 15)) * 0x846CA68BU;
  return x ^ (x >> 16);
}
ECHO_HOST_DEVICE std::uint32_t hash(std::uint32_t a, std::uint32_t b) { return hash(hash(a) + b * 0x9E3779B9U); }

/// The 4-byte word `word` of a host row, as the slabs are filled: finite values in the format of rows of so many bytes,
/// FP8 codes below 32 with scales of 2^-9 to 2^-6, bf16 numbers of 1/8 to 2.
ECHO_HOST_DEVICE std::uint32_t row_word(std::int32_t layer, std::int32_t row, std::int32_t word,
                                        std::int32_t row_bytes) {
  const std::uint32_t key = hash(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(layer));
  const std::uint32_t random = hash(key + static_cast<std::uint32_t>(word) * 0x9E3779B9U);
  if (row_bytes == 656 && word < 128) {
    return random & 0xDFDFDFDFU;
  }
  if (row_bytes == 656 && word < 132) {
    return (118U + random % 4U) << 23;
  }
  return (random & 0x81FF81FFU) | 0x3E003E00U;
}

/// Element of the KV row (bf16, -4 to 4) that a batch entry appends at a position.
ECHO_HOST_DEVICE std::uint16_t kv_element(std::int32_t layer, std::int32_t entry, std::int32_t position,
                                          std::int32_t dim) {
  const std::uint32_t token = hash(static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(entry));
  const std::uint32_t bits = hash(token, static_cast<std::uint32_t>(layer * 1024 + dim));
  return to_bf16(static_cast<float>(static_cast<std::int16_t>(bits & 0xFFFFU)) / 8192.0F);
}

/// In [0, 1).
ECHO_HOST_DEVICE float unit_float(std::uint32_t bits) { return static_cast<float>(bits >> 8) * (1.0F / 16777216.0F); }

#ifdef __CUDACC__
/// The place of i in a random permutation of [0, count), another for each key: bijections of the next power of two,
/// repeated until the result is in range.
__device__ inline std::int32_t permuted(std::int32_t i, std::int32_t count, std::uint32_t key) {
  const int bits = max(1, 32 - __clz(count - 1));
  const std::uint32_t mask = (1U << bits) - 1U;
  const int shift = (bits + 1) / 2;
  auto x = static_cast<std::uint32_t>(i);
  do {
#pragma unroll
    for (std::uint32_t round = 0; round < 3; ++round) {
      x = (x + hash(key, round)) & mask;
      x = (x * 0x9E3779B1U) & mask;
      x ^= x >> shift;
    }
  } while (x >= static_cast<std::uint32_t>(count));
  return static_cast<std::int32_t>(x);
}
#endif

}  // namespace echo::bench
