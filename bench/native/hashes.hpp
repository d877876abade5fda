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

/// The 4-byte word `word` of a host row, as the slabs are filled.
ECHO_HOST_DEVICE std::uint32_t row_word(std::int32_t layer, std::int32_t row, std::int32_t word) {
  const std::uint32_t key = hash(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(layer));
  return hash(key + static_cast<std::uint32_t>(word) * 0x9E3779B9U);
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

}  // namespace echo::bench
