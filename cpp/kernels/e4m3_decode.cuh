#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace echo {

/// The values of four e4m3 codes as they lie in memory; exact, through the conversion instructions
/// where the GPU has them.
__device__ inline float4 unpack_e4m3(std::uint32_t codes) {
  const __half2 low =
      __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xFFFFU), __NV_E4M3));
  const __half2 high = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16), __NV_E4M3));
  const float2 first = __half22float2(low);
  const float2 second = __half22float2(high);
  return make_float4(first.x, first.y, second.x, second.y);
}

}  // namespace echo
