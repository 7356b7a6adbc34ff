// Element types on devices, with the hardware's conversions; the host's are in kernels/element.h.
//
// The conversions are those of cuda_fp16.h and cuda_bf16.h, which take longer to compile than the
// kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../cpp/philox/philox.h"

namespace dist_rng::DIST_RNG_ISA {

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// static_cast<T>(value) as torch's scalar types define it: halves go through float.
template <typename T, typename V>
DIST_RNG_INLINE T cast(V value) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    T made;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(made.bits) : "f"(static_cast<float>(value)));
    return made;
  } else if constexpr (std::is_same_v<T, Float16>) {
    T made;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(made.bits) : "f"(static_cast<float>(value)));
    return made;
  } else {
    return static_cast<T>(value);
  }
}

DIST_RNG_INLINE float to_float(Bfloat16 x) {
  return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16);
}

DIST_RNG_INLINE float to_float(Float16 x) {
  float made;
  asm("cvt.f32.f16 %0, %1;" : "=f"(made) : "h"(x.bits));
  return made;
}

DIST_RNG_INLINE float to_float(float x) { return x; }
DIST_RNG_INLINE double to_float(double x) { return x; }

DIST_RNG_INLINE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
DIST_RNG_INLINE double fma_of(double a, double b, double c) { return fma(a, b, c); }

}  // namespace dist_rng::DIST_RNG_ISA
