#pragma once

#include <cstdint>
#include <vector>

#include "reference/simd/attend_loops.hpp"
#include "reference/simd/score_loops.hpp"

namespace echo {

/// Instruction sets that the inner loops are compiled for.
enum class SimdLevel : std::uint8_t { base, avx2, avx512 };

struct SimdLoops {
  ScoreLoops score;
  AttendLoops attend;
};

/// What this CPU and this build can run, slowest first; never empty.
std::vector<SimdLevel> usable_simd_levels();
/// The loops of one usable level.
SimdLoops simd_loops(SimdLevel level);

}  // namespace echo
