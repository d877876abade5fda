#pragma once
// Whether rows in a layer's slots may hold NaN codes, the e4m3 codes 0x7F and 0xFF.
//
// Attention for Hopper unpacks codes faster than by their definition, and takes NaN for 480; to look at each code of
// each row that it reads takes 3 to 4 % of its time. So who puts a row into a slot looks, once: its bytes are in
// registers then. What was seen stays noted, and attention looks for NaN itself from then on.

#include <cstdint>

#include "cache_manager/residency.cuh"
#include "echo/model_shape.hpp"

namespace echo {

inline constexpr std::uint32_t kNanMarks = 0x80808080U;

/// Codes at the beginning of each row, where they are looked at: in rows as attention for Hopper unpacks them.
__device__ inline std::int32_t noted_codes(const LayerView& layer) {
  return layer.row_bytes == kFp8RowBytes ? kFp8RowCodes : 0;
}

/// Of four codes: a bit of kNanMarks is set if one is NaN. Those are the codes whose sign bit changes when 1 is added;
/// a carry only comes from a NaN, too.
__device__ __forceinline__ std::uint32_t nan_marks(std::uint32_t codes) { return codes ^ (codes + 0x01010101U); }
__device__ __forceinline__ std::uint32_t nan_marks(const uint4& codes) {
  return nan_marks(codes.x) | nan_marks(codes.y) | nan_marks(codes.z) | nan_marks(codes.w);
}

/// Notes what the marks of a row say that comes to a slot.
__device__ inline void note_nan(const LayerView& layer, std::uint32_t marks) {
  if ((marks & kNanMarks) != 0U) {
    AtomicWord(layer.replacement->nan_codes).store(1, cuda::memory_order_relaxed);
  }
}
/// Whether one was noted. Where the state is not known it may be so.
__device__ inline bool may_have_nan(const LayerView& layer) {
  return layer.replacement == nullptr || AtomicWord(layer.replacement->nan_codes).load(cuda::memory_order_relaxed) != 0;
}

}  // namespace echo
