#pragma once
// Products of a warpgroup (four warps, the first one's index a multiple of four) on Hopper's tensor cores, with fp32
// sums: D[64, N] += A[64, 16] B[16, N] in bf16, or A[64, 32] B[32, N] in e4m3. They run asynchronously: fence,
// products, commit, wait; in between the registers of D (and A) must not be touched.
//
// Fragments: thread t of the warpgroup holds, with g = t % 32 / 4, c = t % 4 and r = 16 * (t / 32) + g,
//   D[4 j + {0, 1}] = row r,     columns 8 j + 2 c + {0, 1}      D[4 j + {2, 3}] = the same of row r + 8
// and in bf16
//   A[0] = row r, columns 2 c + {0, 1}    A[1] = row r + 8    A[2], A[3] = the same of columns + 8
//
// Operands in shared memory use the 128-byte swizzle: atoms of 8 rows x 128 bytes, 1024 bytes, aligned to their size,
// in which 16-byte chunk i of row r lies at place i ^ r.
//   K-major    rows are M or N, 64 bf16 or 128 e4m3 of K in a row; groups of 8 rows follow each other. The next step
//              of K (16 or 32): + 32 B
//   MN-major   rows are K, 64 elements of N in a row; groups of 8 rows follow each other, and the next 64 of N lie
//              `stride` bytes further on. The next 16 of K: + 2048 B

#include <cstdint>

namespace echo::ptx {

inline constexpr std::uint32_t kSwizzleAtom = 1024;
inline constexpr std::uint32_t kSwizzleRow = 128;

/// Where byte `byte` of row `row` of an operand lies.
__device__ __forceinline__ std::uint32_t swizzled(std::uint32_t row, std::uint32_t byte) {
  return row * kSwizzleRow + (byte ^ ((row & 7U) << 4));
}

/// Matrix descriptor: start address, the two strides (in units of 16 bytes) and the swizzle.
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t address, std::uint32_t leading,
                                                    std::uint32_t stride) {
  constexpr std::uint64_t kSwizzle128 = 1ULL << 62;
  return kSwizzle128 | static_cast<std::uint64_t>(stride >> 4) << 32 | static_cast<std::uint64_t>(leading >> 4) << 16 |
         ((address & 0x3FFFFU) >> 4);
}
/// The leading stride has no meaning where a row of K is a whole swizzle row.
__device__ __forceinline__ std::uint64_t k_major(std::uint32_t address) {
  return descriptor(address, 16, kSwizzleAtom);
}
__device__ __forceinline__ std::uint64_t mn_major(std::uint32_t address, std::uint32_t stride) {
  return descriptor(address, stride, kSwizzleAtom);
}
/// The same descriptor, of which the compiler knows nothing: those of the steps are additions to it, then, and not all
/// worked out before a loop and kept.
__device__ __forceinline__ std::uint64_t worked_out_here(std::uint64_t descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}
/// The word of k_major that depends on the address; n bytes further on it is n / 16 more. And the whole of it.
__device__ __forceinline__ std::uint32_t k_major_word(std::uint32_t address) {
  return static_cast<std::uint32_t>(k_major(address));
}
__device__ __forceinline__ std::uint64_t k_major_of(std::uint32_t word) {
  return (k_major(0) & 0xFFFFFFFF00000000ULL) | word;
}
/// The operand `bytes` further on.
__device__ __forceinline__ std::uint64_t advanced(std::uint64_t descriptor, std::uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving what is done to these registers across this point: it does not know that products
/// in flight write to them.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}

#define ECHO_F4(d, i) "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define ECHO_F16(d, i) ECHO_F4(d, i), ECHO_F4(d, (i) + 4), ECHO_F4(d, (i) + 8), ECHO_F4(d, (i) + 12)
#define ECHO_F64(d, i) ECHO_F16(d, i), ECHO_F16(d, (i) + 16), ECHO_F16(d, (i) + 32), ECHO_F16(d, (i) + 48)
#define ECHO_D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define ECHO_D32                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "          \
  "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define ECHO_D64                                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "  \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "  \
  "%62, %63}"

/// D[64, 64] = A B or += A B; both K-major in shared memory.
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " ECHO_D32
      ", %32, %33, p, 1, 1, 0, 0;\n"
      "}"
      : ECHO_F16(d, 0), ECHO_F16(d, 16)
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(add)));
}

/// Columns kFirst to kFirst + 127 of D[64, 256] += A B[16, 128]; A K-major, B MN-major, both in shared memory. Products
/// with 256 columns take more registers than a thread has when a block of four warpgroups starts.
template <int kFirst>
__device__ __forceinline__ void wgmma_64x128(float (&d)[128], std::uint64_t a, std::uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " ECHO_D64 ", %64, %65, 1, 1, 1, 0, 1;"
               : ECHO_F64(d, kFirst / 2)
               : "l"(a), "l"(b));
}

/// The same with A in registers.
template <int kFirst>
__device__ __forceinline__ void wgmma_64x128(float (&d)[128], const std::uint32_t (&a)[4], std::uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " ECHO_D64
               ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : ECHO_F64(d, kFirst / 2)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/// D[64, N] = A B or += A B in e4m3; both K-major in shared memory.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[16], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 " ECHO_D16
      ", %16, %17, p, 1, 1;\n"
      "}"
      : ECHO_F16(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(add)));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ECHO_D32
      ", %32, %33, p, 1, 1;\n"
      "}"
      : ECHO_F16(d, 0), ECHO_F16(d, 16)
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(add)));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " ECHO_D64
      ", %64, %65, p, 1, 1;\n"
      "}"
      : ECHO_F64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(add)));
}

#undef ECHO_F4
#undef ECHO_F16
#undef ECHO_F64
#undef ECHO_D16
#undef ECHO_D32
#undef ECHO_D64

/// Moves registers between the warpgroups of a block; every warpgroup calls one of them once, first thing.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace echo::ptx
