#include "kernels/index_key_map.hpp"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <string>

#include "echo/errors.hpp"
#include "kernels/cuda_check.hpp"

namespace echo {
namespace {

using EncodeTiled = PFN_cuTensorMapEncodeTiled_v12000;

/// Found at run time, so that the library does not need the driver to be loaded. Null where there is none.
EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr const char* kName = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(function);
}

EncodeTiled encode_tiled() {
  static const EncodeTiled function = find_encode_tiled();
  return function;
}

}  // namespace

bool has_index_key_map() { return encode_tiled() != nullptr; }

CUtensorMap index_key_map(const LayerView& layer) {
  CUtensorMap map{};
  constexpr cuuint32_t kDimensions = 3;
  const cuuint64_t extents[kDimensions] = {kMapRowBytes, kMapBlockRows,
                                           static_cast<cuuint64_t>(layer.host_rows / kTokensPerBlock)};
  const cuuint64_t strides[kDimensions - 1] = {kMapRowBytes, static_cast<cuuint64_t>(layer.index_block_bytes)};
  const cuuint32_t box[kDimensions] = {kMapRowBytes, kMapBlockRows, 1};
  const cuuint32_t steps[kDimensions] = {1, 1, 1};
  // The L2 cache is not to fetch more than is asked for: all of a block is. That is 1 to 2 % faster than with a
  // promotion to 256 bytes, and in some states of the cache 8 %.
  const CUresult result = encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kDimensions, layer.index_keys, extents,
                                         strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw CudaError("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)) + " for " +
                    std::to_string(extents[2]) + " blocks of index keys, " + std::to_string(layer.index_block_bytes) +
                    " bytes apart");
  }
  return map;
}

}  // namespace echo
