// The float logarithm, sine and cosine of torch's AVX2 normal_, bit for bit.
//
// Polynomials of Stephen Moshier's Cephes library, in the order of operations that avx_mathfun
// (Julien Pommier, Giovanni Garberoglio; zlib license) introduced, with an fma wherever torch's
// compiler contracts a product and a sum. Scalar: the loop around it is vectorised.
#pragma once

#include <cstdint>

#include "element.h"

namespace dist_rng::DIST_RNG_ISA {

// The natural logarithm of a positive normal number.
inline float cephes_log(float x) {
  // x = mantissa * 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)).
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const float half = __builtin_bit_cast(float, (bits & 0x007fffff) | 0x3f000000);
  const bool low = half < 0.707106781186547524f;
  const float f = half - 1.0f + (low ? half : 0.0f);
  const float exponent = static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 127) + 1.0f -
                         (low ? 1.0f : 0.0f);
  const float square = f * f;
  float y = fma_of(7.0376836292E-2f, f, -1.1514610310E-1f);
  y = fma_of(y, f, 1.1676998740E-1f);
  y = fma_of(y, f, -1.2420140846E-1f);
  y = fma_of(y, f, 1.4249322787E-1f);
  y = fma_of(y, f, -1.6668057665E-1f);
  y = fma_of(y, f, 2.0000714765E-1f);
  y = fma_of(y, f, -2.4999993993E-1f);
  y = fma_of(y, f, 3.3333331174E-1f);
  y = fma_of(y * f, square, exponent * -2.12194440e-4f);
  y = fma_of(-square, 0.5f, y);
  return fma_of(exponent, 0.693359375f, f + y);
}

struct SineCosine {
  float sine;
  float cosine;
};

// Sine and cosine of 0 <= x < 8192.
inline SineCosine cephes_sincos(float x) {
  // The even octant j, and what is left of x after j * pi / 4, in three steps.
  const std::int32_t octant = (static_cast<std::int32_t>(x * 1.27323954473516f) + 1) & ~1;
  const float j = static_cast<float>(octant);
  x = fma_of(j, -0.78515625f, x);
  x = fma_of(j, -2.4187564849853515625e-4f, x);
  x = fma_of(j, -3.77489497744594108e-8f, x);
  const float square = x * x;

  float even = fma_of(2.443315711809948E-005f, square, -1.388731625493765E-003f);
  even = fma_of(even, square, 4.166664568298827E-002f);
  even = fma_of(even * square, square, -(square * 0.5f)) + 1.0f;
  float odd = fma_of(-1.9515295891E-4f, square, 8.3321608736E-3f);
  odd = fma_of(odd, square, -1.6666654611E-1f);
  odd = fma_of(odd * square, x, x);

  const bool swapped = octant & 2;
  const float sine = swapped ? even : odd, cosine = swapped ? odd : even;
  const std::uint32_t flip_sine = static_cast<std::uint32_t>(octant & 4) << 29;
  const std::uint32_t flip_cosine = static_cast<std::uint32_t>(~(octant - 2) & 4) << 29;
  return {__builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, sine) ^ flip_sine),
          __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, cosine) ^ flip_cosine)};
}

}  // namespace dist_rng::DIST_RNG_ISA
