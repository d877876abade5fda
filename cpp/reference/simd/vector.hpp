#pragma once
// The vector of floats of the instruction set that a file of this folder is compiled for. Each file
// is compiled once per set, in namespace ECHO_SIMD_NAMESPACE. Everything here has internal linkage
// and the files use no std templates, so that no function compiled for one CPU can be linked into
// the code of another.

namespace echo {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorFloats = 16;
#elif defined(__AVX2__)
constexpr int kVectorFloats = 8;
#else
constexpr int kVectorFloats = 4;
#endif

using Vector = float __attribute__((vector_size(kVectorFloats * sizeof(float))));
/// The same where it need not be aligned.
using LooseVector =
    float __attribute__((vector_size(kVectorFloats * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* address) { return *reinterpret_cast<const LooseVector*>(address); }
inline void store(float* address, Vector value) { *reinterpret_cast<LooseVector*>(address) = value; }

}  // namespace
}  // namespace echo
