// Element types as torch rounds to them: c10's Half and BFloat16 without c10.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernel_set.h"

namespace dist_rng::DIST_RNG_ISA {

// Enumerations and not structs: compilers vectorise a choice between scalars only.
enum class Bfloat16 : std::uint16_t {};
enum class Float16 : std::uint16_t {};

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Bfloat16> || std::is_same_v<T, Float16>;

// The type in which torch computes elements of type T.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Bits of precision, the leading one included.
template <typename T>
constexpr int kDigits = std::is_same_v<T, Bfloat16>  ? 8
                        : std::is_same_v<T, Float16> ? 11
                                                     : std::numeric_limits<T>::digits;

inline Bfloat16 to_bfloat16(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<Bfloat16>(x != x ? 0x7fc0 : rounded);
}

// Rounds to nearest even by adding a number whose last bit has the weight of a half's last bit.
// NaN becomes the quiet NaN; infinity and overflow become infinity.
inline Float16 to_float16(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t sign = bits & 0x80000000;
  const std::uint32_t size = bits ^ sign;
  const float subnormal = __builtin_bit_cast(float, size) + 0.5f;
  const std::uint32_t small = __builtin_bit_cast(std::uint32_t, subnormal) - 0x3f000000;
  const std::uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  std::uint32_t half = size < 0x38800000 ? small : normal;
  half = size >= 0x477ff000 ? 0x7c00 : half;
  half = size > 0x7f800000 ? 0x7e00 : half;
  return static_cast<Float16>(half | sign >> 16);
}

inline float to_float(Bfloat16 x) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(x) << 16);
}

inline float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(static_cast<std::uint32_t>(x) & 0x8000) << 16;
  const std::uint32_t size = static_cast<std::uint32_t>(static_cast<std::uint32_t>(x) & 0x7fff) << 13;
  // A half's exponent is 112 less; a subnormal half is a multiple of 2^-24.
  const float normal = __builtin_bit_cast(float, size + 0x38000000);
  const float special = __builtin_bit_cast(float, size + 0x70000000);
  const float small = __builtin_bit_cast(float, size + 0x38800000) - 0x1p-14f;
  const float value = size < 0x00800000 ? small : size >= 0x0f800000 ? special : normal;
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, value) | sign);
}

inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }

// static_cast<T>(value) as torch's scalar types define it: halves go through float.
template <typename T, typename V>
inline T cast(V value) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, Float16>) {
    return to_float16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

inline float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma_of(double a, double b, double c) { return __builtin_fma(a, b, c); }

// a * b + c as torch's build rounds it.
template <bool kFused, typename V>
inline V multiply_add(V a, V b, V c) {
  return kFused ? fma_of(a, b, c) : a * b + c;
}

// The low 53 bits of a 64-bit draw, whose high half is drawn first.
inline std::uint64_t low_53_bits(const std::uint32_t* words) {
  return static_cast<std::uint64_t>(words[0] & 0x1fffff) << 32 | words[1];
}

inline std::uint64_t draw_64(const std::uint32_t* words) {
  return static_cast<std::uint64_t>(words[0]) << 32 | words[1];
}

// A number in [0, 1), as torch's uniform_real_distribution<V>(0, 1) draws it.
template <typename V>
inline V unit(const std::uint32_t* words) {
  if constexpr (std::is_same_v<V, double>) {
    return static_cast<double>(static_cast<std::int64_t>(low_53_bits(words))) * 0x1p-53;
  } else {
    return static_cast<float>(static_cast<std::int32_t>(words[0] & 0xffffff)) * 0x1p-24f;
  }
}

// Words that unit<V>() uses.
template <typename V>
constexpr int kUnitWords = std::is_same_v<V, double> ? 2 : 1;

// Calls f.template operator()<T>() for a floating-point dtype; an empty kernel otherwise.
template <typename F>
Kernel for_floating(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f.template operator()<float>();
    case Dtype::kFloat64:
      return f.template operator()<double>();
    case Dtype::kBfloat16:
      return f.template operator()<Bfloat16>();
    case Dtype::kFloat16:
      return f.template operator()<Float16>();
    default:
      return {};
  }
}

// The same for every dtype but the unsigned ones of more than eight bits.
template <typename F>
Kernel for_common(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kUint8:
      return f.template operator()<std::uint8_t>();
    case Dtype::kInt8:
      return f.template operator()<std::int8_t>();
    case Dtype::kInt16:
      return f.template operator()<std::int16_t>();
    case Dtype::kInt32:
      return f.template operator()<std::int32_t>();
    case Dtype::kInt64:
      return f.template operator()<std::int64_t>();
    case Dtype::kBool:
      return f.template operator()<bool>();
    default:
      return for_floating(dtype, f);
  }
}

// The same for every dtype.
template <typename F>
Kernel for_every(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kUint16:
      return f.template operator()<std::uint16_t>();
    case Dtype::kUint32:
      return f.template operator()<std::uint32_t>();
    case Dtype::kUint64:
      return f.template operator()<std::uint64_t>();
    default:
      return for_common(dtype, f);
  }
}

}  // namespace dist_rng::DIST_RNG_ISA
