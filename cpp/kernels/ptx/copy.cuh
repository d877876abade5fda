#pragma once
// Data movement on Hopper: loads and copies of 16 bytes, the stores that match the tensor cores' fragments, and the
// fence between ordinary accesses to shared memory and those of the tensor cores and the copy engine.

#include <cstdint>

namespace echo::ptx {

/// Orders this thread's ordinary writes to shared memory before what tensor cores and the copy engine do there, once a
/// barrier has told them.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// The same for global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// 16 bytes of global memory, past the first-level cache.
__device__ __forceinline__ uint4 load(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

/// The same where `there`; elsewhere the value stays.
__device__ __forceinline__ void load_if(bool there, const void* address, uint4& value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
      : "l"(address), "r"(there ? 1 : 0)
      : "memory");
}

__device__ __forceinline__ void load_if(bool there, const void* address, float& x, float& y, float& z, float& w) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(x), "+f"(y), "+f"(z), "+f"(w)
      : "l"(address), "r"(there ? 1 : 0)
      : "memory");
}

/// A word, likewise.
__device__ __forceinline__ void load_if(bool there, const void* address, std::uint32_t& value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p ld.global.L1::no_allocate.b32 %0, [%1];\n"
      "}"
      : "+r"(value)
      : "l"(address), "r"(there ? 1 : 0)
      : "memory");
}

/// A word likewise.
__device__ __forceinline__ std::int32_t load_word(const void* address) {
  std::int32_t value = 0;
  asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// A word of global memory. The load stays where it is written, also where few of those that come by use the value.
__device__ __forceinline__ std::int32_t load_ahead(const std::int32_t* address) {
  std::int32_t value = 0;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// 16 bytes to global memory.
__device__ __forceinline__ void store(void* address, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

/// A word to global memory that the L2 cache is to give up first.
__device__ __forceinline__ void store_streaming(float* address, float value) {
  asm volatile("st.global.cs.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared(std::uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

/// 16 bytes to shared memory where `near`, else to global memory; and from there. Without a branch, so that many are
/// under way.
__device__ __forceinline__ void store_either(bool near, std::uint32_t shared, void* global, const uint4& value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %6, 0;\n"
      "@p st.shared.v4.u32 [%4], {%0, %1, %2, %3};\n"
      "@!p st.global.v4.u32 [%5], {%0, %1, %2, %3};\n"
      "}" ::"r"(value.x),
      "r"(value.y), "r"(value.z), "r"(value.w), "r"(shared), "l"(global), "r"(near ? 1 : 0)
      : "memory");
}
__device__ __forceinline__ uint4 load_either(bool near, std::uint32_t shared, const void* global) {
  uint4 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %6, 0;\n"
      "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "@!p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5];\n"
      "}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "r"(shared), "l"(global), "r"(near ? 1 : 0)
      : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

/// A word of shared memory.
__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t value = 0;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

/// A word of shared memory that another warp of the block writes, as it is now.
__device__ __forceinline__ std::int32_t load_shared_volatile(std::uint32_t address) {
  std::int32_t value = 0;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared_volatile_pair(std::uint32_t address) {
  uint2 words;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
  return words;
}

/// Stores a word that, to the device, tells of all that this thread has done and seen done before.
__device__ __forceinline__ void store_release(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
/// Loads such a word: what it tells of is seen.
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* address) {
  std::uint32_t value = 0;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// Starts a copy of 16 bytes to shared memory; zeros, and the source unread, where it is not `real`.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

inline constexpr std::int32_t kCacheLine = 128;

/// Brings a line into the L2 cache, without waiting.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/// Brings `bytes` from an address, both multiples of 16, into the L2 cache. The copy engine does it: no fence
/// and no cp.async.wait waits for it, as they would for copies or loads.
__device__ __forceinline__ void prefetch(const void* address, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

/// Four 8 x 8 matrices of 16-bit elements: matrix i is register i of all lanes, lane l holding elements 2 (l % 4) and
/// the next of row l / 4; lane 8 i + r gives the address of row r of matrix i, 16 bytes.
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

/// Byte i of the result is byte n of two words, n the lowest three bits of hexadecimal digit i of the selector; or,
/// with the digit's fourth bit, eight times that byte's sign.
__device__ __forceinline__ std::uint32_t permuted(std::uint32_t first, std::uint32_t second, std::uint32_t selector) {
  std::uint32_t result = 0;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(first), "r"(second), "r"(selector));
  return result;
}

/// Two floats as bf16 or f16, round to nearest even, the first in the lower half.
__device__ __forceinline__ std::uint32_t to_bf16x2(float first, float second) {
  std::uint32_t packed = 0;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}
__device__ __forceinline__ std::uint32_t to_f16x2(float first, float second) {
  std::uint32_t packed = 0;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}
__device__ __forceinline__ std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/// threadIdx.x, read anew: what is computed from it is not kept in registers from before.
__device__ __forceinline__ std::uint32_t thread_anew() {
  std::uint32_t thread = 0;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// The same number, of which the compiler knows nothing: the blocks of a launch are one thread high.
__device__ __forceinline__ std::uint32_t unknown(std::uint32_t number) { return number * blockDim.y; }

/// 2^x.
__device__ __forceinline__ float exp2_approx(float x) {
  float y = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace echo::ptx
