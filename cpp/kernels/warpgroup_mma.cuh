#pragma once
// Matrix products of a warpgroup (four warps, the first one's index a multiple of four) on sm_90a's tensor cores:
// D[64, n] = A[64, 128] x B[n, 128]^T of e4m3, summed in fp32, both operands in shared memory.
//
// Operands: rows of 128 bytes one behind the other, from a multiple of 1024 bytes on. The 16-byte pieces of row r are
// permuted: piece c lies where piece c ^ (r % 8) would (the 128-byte swizzle, which the copy engine writes and which
// keeps eight rows' pieces of a column in different banks).
// Result: lane l of warp w holds, as element 4 j + 2 t + e, row 16 w + l / 4 + 8 t, column 8 j + 2 (l % 4) + e.

#include <cstdint>

namespace echo {

inline constexpr int kMmaRows = 64;
inline constexpr int kMmaRowBytes = 128;

/// Byte of a row of an operand after swizzling.
__device__ inline std::uint32_t swizzled(std::uint32_t row, std::uint32_t byte) {
  return row * kMmaRowBytes + (byte ^ ((row % 8) * 16));
}

/// Describes the operand at an address in shared memory: start, distance between groups of 8 rows, swizzle of 128
/// bytes; addresses in units of 16 bytes. The other stride is not used with this swizzle.
__device__ inline std::uint64_t operand_at(std::uint32_t shared_address) {
  constexpr std::uint64_t kEightRows = static_cast<std::uint64_t>(8 * kMmaRowBytes / 16) << 32;
  constexpr std::uint64_t kUnused = std::uint64_t{1} << 16;
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | kEightRows | kUnused | ((shared_address & 0x3FFFFU) >> 4);
}

namespace detail {

/// A step of 32 of the 128 dimensions: d = a x b, plus d if `add`.
__device__ inline void multiply_step(float (&d)[16], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(add)));
}

__device__ inline void multiply_step(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(add)));
}

__device__ inline void multiply_step(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(add)));
}

}  // namespace detail

/// Begins d = a x b of n = 2 x kElements columns. Called by all four warps with the same operands.
template <int kElements>
__device__ void begin_multiply(float (&d)[kElements], std::uint64_t a, std::uint64_t b) {
  constexpr int kStepBytes = 32;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < kMmaRowBytes / kStepBytes; ++step) {
    constexpr std::uint64_t kStep = kStepBytes / 16;  // inside the swizzled row the start just moves on
    detail::multiply_step(d, a + step * kStep, b + step * kStep, step > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits for the products that were begun; d is theirs.
template <int kElements>
__device__ void finish_multiply(float (&d)[kElements]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");  // no use of the result may move up over the wait
  }
}

}  // namespace echo
