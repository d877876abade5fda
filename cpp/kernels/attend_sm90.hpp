#pragma once

#include <cstdint>

#include "kernels/launch.hpp"
#include "kernels/params.hpp"

namespace echo {

inline constexpr std::int32_t kMaxSplits = 32;      ///< blocks of a team
inline constexpr std::int32_t kAttendBlocks = 144;  ///< at once, at most: the multiprocessors of the largest Hopper GPU
inline constexpr std::int32_t kAttendPartBytes = 66 * 1024;
inline constexpr std::int32_t kAttendTold = 8 * kMaxSplits;  ///< words of a team
inline constexpr std::int32_t kAttendRunningBytes = 132 * 1024 + 128;

/// What a team does at a time: a query row and 64 heads.
inline std::int32_t attend_items(const ShapeView& shape, std::int32_t rows) {
  return rows * ((shape.query_heads + 63) / 64);
}

/// Whether the kernel is for such rows, for so many splits, and for calls of up to so many query rows: with more than
/// 46,340 of 128 heads it could not tell whose an item is (Work::part_of).
inline bool suits_attend_sm90(const ShapeView& shape, std::int32_t splits, std::int32_t query_rows) {
  return (shape.row_format == RowFormat::fp8_656 || shape.row_format == RowFormat::bf16_1152) &&
         shape.latent_dim == 512 && shape.rope_dim == 64 && shape.top_k % 64 == 0 && splits >= 1 &&
         splits <= kMaxSplits && std::int64_t{attend_items(shape, query_rows)} * query_rows < std::int64_t{1} << 32;
}

/// Device memory in which the blocks of a team meet, and hand over to the next team; zero before the first launch.
struct AttendExchange {
  void* parts;            ///< [2, blocks] of kAttendPartBytes
  std::uint32_t* told;    ///< [teams, kAttendTold]
  void* running;          ///< [blocks] of kAttendRunningBytes
  std::uint32_t* ticket;  ///< [1] the next block's
};

/// How attend_sm90 runs on a device for one shape; decided once.
struct AttendSm90Plan {
  std::int32_t splits = 0;  ///< blocks of a team
  std::int32_t teams = 0;   ///< that run at once; 0: the kernel cannot be used, attend_splits has to do
};

/// The kernel needs a Hopper GPU (and a build for sm_90a), rows of 512 latents and 64 rope elements in FP8 or BF16,
/// top_k a multiple of 64 and 1 to 32 splits. `query_rows`: of a call, at most.
AttendSm90Plan plan_attend_sm90(const ShapeView& shape, std::int32_t splits, std::int32_t query_rows, int device);

/// One launch for the whole block, of as many thread blocks as are returned, each with a multiprocessor of its own.
/// Throws InvalidArgument naming `q`, `slots` or `out` where they are not aligned to 16 bytes.
int launch_attend_sm90(const AttendParams& params, const AttendSm90Plan& plan, const AttendExchange& exchange,
                       const LaunchContext& context);

}  // namespace echo
