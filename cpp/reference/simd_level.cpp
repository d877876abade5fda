#include "reference/simd_level.hpp"

namespace echo {

std::vector<SimdLevel> usable_simd_levels() {
  std::vector<SimdLevel> levels{SimdLevel::base};
#if defined(ECHO_SIMD_X86)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    levels.push_back(SimdLevel::avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      levels.push_back(SimdLevel::avx512);
    }
  }
#endif
  return levels;
}

SimdLoops simd_loops(SimdLevel level) {
#if defined(ECHO_SIMD_X86)
  if (level == SimdLevel::avx512) {
    return {.score = simd_avx512::score_loops, .attend = simd_avx512::attend_loops};
  }
  if (level == SimdLevel::avx2) {
    return {.score = simd_avx2::score_loops, .attend = simd_avx2::attend_loops};
  }
#endif
  static_cast<void>(level);
  return {.score = simd_base::score_loops, .attend = simd_base::attend_loops};
}

}  // namespace echo
