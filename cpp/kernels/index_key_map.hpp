#pragma once

#include <cuda.h>

#include "cache_manager/layer_view.hpp"

namespace echo {

inline constexpr int kMapRowBytes = 128;  ///< of an FP8 key of 128 dimensions, which is also the width of the swizzle
/// Rows of a block of such keys: 64 keys, and two rows' worth of scales right behind them.
inline constexpr int kMapBlockRows = kTokensPerBlock + kTokensPerBlock * 4 / kMapRowBytes;
inline constexpr int kMapBlockBytes = kMapBlockRows * kMapRowBytes;

/// Whether the driver can make such maps.
bool has_index_key_map();

/// Tells the copy engine how a layer's index keys lie: [blocks, kMapBlockRows, kMapRowBytes], one block at a time,
/// with the 128-byte swizzle in shared memory. For keys of kMapRowBytes bytes. Does not wait; valid as long as the
/// keys stay where they are.
CUtensorMap index_key_map(const LayerView& layer);

}  // namespace echo
