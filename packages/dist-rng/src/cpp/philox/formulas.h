// Computes an element from the words of a call: one formula per distribution, hosts and devices.
//
// Include it after the element types (kernels/element.h on hosts, cuda/element.cuh on devices),
// which define Wide, cast, to_float and fma_of. Wherever nvcc contracts a * b + c in torch's
// kernels, this source calls fma_of, so that hosts agree; there is no other a * b + c.
//
// Sources: aten/src/ATen/native/cuda/DistributionTemplates.h, ATen/core/TransformationHelper.h,
// and cuRAND's curand_uniform.h and curand_normal.h. The Python reference is philox/reference.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "launch.h"
#include "philox.h"

namespace dist_rng::DIST_RNG_ISA {

// Elements made from one call.
template <typename T>
constexpr int kFloatUnroll = std::is_same_v<T, double> ? 2 : 4;

// In (0, 1].
DIST_RNG_INLINE float unit_32(std::uint32_t word) {
  return fma_of(static_cast<float>(word), 0x1p-32f, 0x1p-33f);
}

DIST_RNG_INLINE std::int64_t bits_53(std::uint32_t low, std::uint32_t high) {
  return static_cast<std::int64_t>(low ^ static_cast<std::uint64_t>(high) << 21);
}

DIST_RNG_INLINE double unit_53(std::uint32_t low, std::uint32_t high) {
  return fma_of(static_cast<double>(bits_53(low, high)), 0x1p-53, 0x1p-54);
}

template <typename V>
DIST_RNG_INLINE V unit_of(const Words& words, int lane) {
  if constexpr (std::is_same_v<V, double>) {
    return unit_53(pick(words, 2 * lane), pick(words, 2 * lane + 1));
  } else {
    return unit_32(pick(words, lane));
  }
}

template <typename T>
struct UniformOf {
  static constexpr int kUnroll = kFloatUnroll<T>;
  using V = Wide<T>;
  V range, low, limit;
  T low_rounded;

  DIST_RNG_INLINE explicit UniformOf(const PhiloxArguments& arguments)
      : low_rounded(cast<T>(arguments.a)) {
    low = to_float(low_rounded);
    limit = to_float(cast<T>(arguments.b));
    range = to_float(cast<T>(static_cast<V>(limit - low)));
  }

  DIST_RNG_INLINE T operator()(const Words& words, int lane) const {
    const T value = cast<T>(fma_of(unit_of<V>(words, lane), range, low));
    return to_float(value) == limit ? low_rounded : value;
  }
};

// The uniform that gives the angle has 2 pi folded into its scale.
constexpr float kTurn = 0x1p-32f * 6.2831855f;

DIST_RNG_INLINE float standard_normal(const Words& words, int lane, float) {
  const float radius_unit = unit_32(pick(words, lane & 2));
  const float angle = fma_of(static_cast<float>(pick(words, (lane & 2) + 1)), kTurn, kTurn / 2);
  const float radius = sqrtf(-2.0f * logf(radius_unit));
#if defined(__CUDA_ARCH__)
  // cuRAND, and so torch's kernel, uses the hardware's sine and cosine.
  return radius * (lane & 1 ? __cosf(angle) : __sinf(angle));
#else
  return radius * (lane & 1 ? cosf(angle) : sinf(angle));
#endif
}

#if !defined(__CUDA_ARCH__)
// sin(pi x) or cos(pi x), 0 < x <= 2, reduced before pi is rounded: as exact as CUDA's sincospi.
inline double trigonometric_pi(double x, bool cosine) {
  const double quarter = std::nearbyint(2.0 * x);
  const double rest = (x - 0.5 * quarter) * 3.14159265358979323846;
  const int turn = (static_cast<int>(quarter) + (cosine ? 1 : 0)) & 3;
  const double value = turn & 1 ? std::cos(rest) : std::sin(rest);
  return turn & 2 ? -value : value;
}
#endif

DIST_RNG_INLINE double standard_normal(const Words& words, int lane, double) {
  const double angle = fma_of(static_cast<double>(bits_53(words.z, words.w)), 0x1p-52, 0x1p-53);
  const double radius = sqrt(-2.0 * log(unit_53(words.x, words.y)));
#if defined(__CUDA_ARCH__)
  double sine, cosine;
  sincospi(angle, &sine, &cosine);
  return radius * (lane & 1 ? cosine : sine);
#else
  return radius * trigonometric_pi(angle, lane & 1);
#endif
}

template <typename T>
struct NormalOf {
  static constexpr int kUnroll = kFloatUnroll<T>;
  using V = Wide<T>;
  V mean, std;

  DIST_RNG_INLINE explicit NormalOf(const PhiloxArguments& arguments)
      : mean(static_cast<V>(arguments.a)), std(static_cast<V>(arguments.b)) {}

  DIST_RNG_INLINE T operator()(const Words& words, int lane) const {
    return cast<T>(fma_of(standard_normal(words, lane, V{}), std, mean));
  }
};

DIST_RNG_INLINE float torch_log(float x) {
#if defined(__CUDA_ARCH__)
  return __logf(x);  // at::log on devices
#else
  return logf(x);
#endif
}

DIST_RNG_INLINE double torch_log(double x) { return log(x); }

template <typename T>
struct ExponentialOf {
  static constexpr int kUnroll = kFloatUnroll<T>;
  using V = Wide<T>;
  V scale;

  DIST_RNG_INLINE explicit ExponentialOf(const PhiloxArguments& arguments)
      : scale(static_cast<V>(-1.0) / static_cast<V>(arguments.a)) {}

  DIST_RNG_INLINE T operator()(const Words& words, int lane) const {
    // Half an epsilon replaces the logarithm of 1 and of its neighbours: no element is 0.
    constexpr V kSmallest = std::is_same_v<V, double> ? 0x1p-53 : 0x1p-24;
    const V u = unit_of<V>(words, lane);
    const V logarithm = u >= static_cast<V>(1.0) - kSmallest ? -kSmallest : torch_log(u);
    return cast<T>(scale * logarithm);
  }
};

template <typename T>
struct BernoulliOf {
  static constexpr int kUnroll = kFloatUnroll<T>;
  using V = Wide<T>;
  V threshold;

  DIST_RNG_INLINE explicit BernoulliOf(const PhiloxArguments& arguments)
      : threshold(static_cast<V>(arguments.a)) {}

  DIST_RNG_INLINE T operator()(const Words& words, int lane) const {
    return cast<T>(static_cast<V>(unit_of<V>(words, lane) < threshold));
  }
};

// The mask of fused dropout.
template <typename T>
struct DropoutMaskOf {
  static constexpr int kUnroll = 4;
  float threshold;

  DIST_RNG_INLINE explicit DropoutMaskOf(const PhiloxArguments& arguments)
      : threshold(static_cast<float>(arguments.a)) {}

  DIST_RNG_INLINE T operator()(const Words& words, int lane) const {
    return unit_32(pick(words, lane)) < threshold;
  }
};

// Takes the element's probability in the type that torch's kernel converts it to.
template <typename T>
struct BernoulliTensorOf {
  static constexpr int kUnroll = 4;
  using V = Wide<T>;

  DIST_RNG_INLINE explicit BernoulliTensorOf(const PhiloxArguments&) {}

  DIST_RNG_INLINE T operator()(const Words& words, int lane, V probability) const {
    return cast<T>(static_cast<V>(unit_32(pick(words, lane)) <= probability));
  }
};

template <typename T>
struct Modulo32Of {
  static constexpr int kUnroll = 4;
  std::uint32_t modulus;
  std::int64_t base;

  DIST_RNG_INLINE explicit Modulo32Of(const PhiloxArguments& arguments)
      : modulus(static_cast<std::uint32_t>(arguments.modulus)), base(arguments.base) {}

  DIST_RNG_INLINE T operator()(const Words& words, int lane) const {
    return cast<T>(static_cast<std::int64_t>(pick(words, lane) % modulus) + base);
  }
};

template <typename T>
struct Modulo64Of {
  static constexpr int kUnroll = 2;
  std::uint64_t modulus, base;

  DIST_RNG_INLINE explicit Modulo64Of(const PhiloxArguments& arguments)
      : modulus(arguments.modulus), base(static_cast<std::uint64_t>(arguments.base)) {}

  DIST_RNG_INLINE T operator()(const Words& words, int lane) const {
    const std::uint64_t word =
        static_cast<std::uint64_t>(pick(words, 2 * lane)) << 32 | pick(words, 2 * lane + 1);
    return cast<T>(static_cast<std::int64_t>(word % modulus + base));
  }
};

}  // namespace dist_rng::DIST_RNG_ISA
