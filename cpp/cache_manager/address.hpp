#pragma once
// The address rule: the only place where (session, position), (layer, host row), (layer, slot) and index-key
// positions become addresses. Shared by CPU and GPU code; all arithmetic on bytes is 64-bit.

#include <cstddef>
#include <cstdint>

#include "echo/model_shape.hpp"

#if defined(__CUDACC__)
#define ECHO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ECHO_HOST_DEVICE inline
#endif

namespace echo {

inline constexpr std::int32_t kNone = -1;  ///< no slot, no host row, no session
inline constexpr std::int32_t kTokensPerBlock = kBlockTokens;

/// Host row of a token, through its session's block table.
ECHO_HOST_DEVICE std::int32_t host_row(const std::int32_t* block_table, std::int32_t position) {
  return block_table[position / kTokensPerBlock] * kTokensPerBlock + position % kTokensPerBlock;
}

/// First byte of row `index` where rows are `stride` bytes apart: slots in a pool, host rows in a slab.
template <typename Byte>
ECHO_HOST_DEVICE Byte* row_address(Byte* base, std::int64_t index, std::int64_t stride) {
  return base + index * stride;
}

/// One block of index keys: 64 keys of `key_bytes` each, then (FP8 only) 64 fp32 scales.
template <typename Byte>
ECHO_HOST_DEVICE Byte* index_key_address(Byte* block, std::int32_t in_block, std::int32_t key_bytes) {
  return block + static_cast<std::int64_t>(in_block) * key_bytes;
}
template <typename Byte>
ECHO_HOST_DEVICE Byte* index_scale_address(Byte* block, std::int32_t in_block, std::int32_t key_bytes) {
  return block + static_cast<std::int64_t>(kTokensPerBlock) * key_bytes +
         static_cast<std::int64_t>(in_block) * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace echo
