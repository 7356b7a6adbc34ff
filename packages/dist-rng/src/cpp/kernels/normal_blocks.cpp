// normal_'s path for 16 elements and more: source ATen/native/cpu/DistributionTemplates.h,
// normal_fill of each release.  Element j of a block takes the cosine of pair (j, j + 8), element j + 8 the sine.
#include <cmath>

#include "cephes.h"
#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

constexpr int kBlock = 16, kHalf = kBlock / 2;
constexpr double kTwoPi = 2.0f * 3.14159265358979323846;

// Pairs of uniforms, then the normals made of them: arrays long enough to fill vectors.
template <typename V>
struct Lanes {
  static constexpr int kMost = 256;

  V first[kMost];
  V second[kMost];
};

// With the C library's functions; kFused says how the last sum is rounded.
template <bool kFused, typename V>
inline void box_muller(Lanes<V>& lanes, int count, V mean, V std) {
  for (int i = 0; i < count; ++i) {
    const V radius = std::sqrt(-2 * std::log(1 - lanes.first[i]));
    const V theta = static_cast<V>(kTwoPi * lanes.second[i]);
    lanes.first[i] = multiply_add<kFused>(radius * std::cos(theta), std, mean);
    lanes.second[i] = multiply_add<kFused>(radius * std::sin(theta), std, mean);
  }
}

// With the functions of torch's AVX2 build.
inline void box_muller_cephes(Lanes<float>& lanes, int count, float mean, float std) {
  for (int i = 0; i < count; ++i) {
    const float radius = __builtin_sqrtf(-2.0f * cephes_log(1.0f - lanes.first[i]));
    const SineCosine of = cephes_sincos(static_cast<float>(kTwoPi) * lanes.second[i]);
    lanes.first[i] = fma_of(radius * of.cosine, std, mean);
    lanes.second[i] = fma_of(radius * of.sine, std, mean);
  }
}

// Before 2.13 the form without an fma of its own is contracted or not, as the build does, and
// serves bf16 and f16 in every build.
template <typename T, bool kFused, bool kBefore213>
bool convert(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
             std::int64_t count) {
  using V = Wide<T>;
  constexpr int kWords = kUnitWords<V>;
  constexpr bool kCephes = kFused && std::is_same_v<V, float> && !(kBefore213 && kIsHalf<T>);
  using Rounded = std::conditional_t<kBefore213, T, V>;
  const V mean = to_float(cast<Rounded>(arguments.mean));
  const V std = to_float(cast<Rounded>(arguments.std));
  T* elements = static_cast<T*>(out);
  alignas(64) Lanes<V> lanes;
  while (count > 0) {
    const int pairs = count < 2 * lanes.kMost ? static_cast<int>(count / 2) : lanes.kMost;
    for (int i = 0; i < pairs; i += kHalf) {
      const std::uint32_t* block = words + 2 * i * kWords;
      for (int j = 0; j < kHalf; ++j) {
        lanes.first[i + j] = unit<V>(block + j * kWords);
        lanes.second[i + j] = unit<V>(block + (kHalf + j) * kWords);
      }
    }
    if constexpr (kCephes) {
      box_muller_cephes(lanes, pairs, mean, std);
    } else {
      box_muller<kFused || !kBefore213>(lanes, pairs, mean, std);
    }
    for (int i = 0; i < pairs; i += kHalf) {
      for (int j = 0; j < kHalf; ++j) elements[2 * i + j] = cast<T>(lanes.first[i + j]);
      for (int j = 0; j < kHalf; ++j) elements[2 * i + kHalf + j] = cast<T>(lanes.second[i + j]);
    }
    words += 2 * pairs * kWords;
    elements += 2 * pairs;
    count -= 2 * pairs;
  }
  return true;
}

}  // namespace

Kernel normal_blocks(Dtype dtype, const Arguments& arguments) {
  const bool fused = arguments.fused, before = arguments.release != Release::kTorch213;
  return for_floating(dtype, [&]<typename T>() -> Kernel {
    constexpr int kWords = kUnitWords<Wide<T>>;
    if constexpr (kIsHalf<T>) {
      if (arguments.release == Release::kTorch211) {
        return {normal_blocks_low_precision(dtype), kWords, kBlock};
      }
    }
    if (before) return {fused ? convert<T, true, true> : convert<T, false, true>, kWords, kBlock};
    return {fused ? convert<T, true, false> : convert<T, false, false>, kWords, kBlock};
  });
}

}  // namespace dist_rng::DIST_RNG_ISA
