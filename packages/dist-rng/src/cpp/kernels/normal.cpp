// normal_: the path in blocks, for 16 contiguous elements and more, and the serial path in pairs,
// which is log_normal_'s for any number of elements.
//
// Sources: ATen/native/cpu/DistributionTemplates.h, normal_fill and normal_fill_16 of each release;
// ATen/core/DistributionsHelper.h, normal_distribution<double> and lognormal_distribution<double>.
#include <cmath>

#include "cephes.h"
#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

// Blocks: element j takes the cosine of pair (j, j + 8), element j + 8 the sine.

constexpr int kBlock = 16, kHalf = kBlock / 2;
constexpr double kTwoPi = 2.0f * 3.14159265358979323846;

// Pairs of uniforms, then the normals made of them; the arrays are long enough for vector loops.
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

// Before 2.13 the C library's form is contracted or not, as torch's build does, and is used for
// bf16 and f16 in every build.
template <typename T, bool kFused, bool kBefore213>
bool convert_blocks(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
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

// Blocks of torch 2.11 in bf16 and f16: every step is rounded to the dtype.

template <typename T>
inline float rounded(double x) {
  return to_float(cast<T>(x));
}

template <typename T>
inline float rounded(float x) {
  return to_float(cast<T>(x));
}

// A uniform with as many random bits as the dtype has.
template <typename T>
inline float coarse_unit(std::uint32_t word) {
  constexpr std::uint32_t kOne = 1u << kDigits<T>;
  return static_cast<float>(word & (kOne - 1)) / static_cast<float>(kOne);
}

template <typename T>
bool convert_blocks_low_precision(const Arguments& arguments, const std::uint32_t* words,
                                  const void*, void* out, std::int64_t count) {
  const float mean = rounded<T>(arguments.mean), std = rounded<T>(arguments.std);
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; i += kBlock) {
    for (int j = 0; j < kHalf; ++j) {
      const float u1 = rounded<T>(1.0f - coarse_unit<T>(words[i + j]));
      const float u2 = coarse_unit<T>(words[i + j + kHalf]);
      const float radius = rounded<T>(std::sqrt(rounded<T>(-2.0f * rounded<T>(std::log(u1)))));
      const float theta = rounded<T>(kTwoPi * u2);
      const auto finish = [&](float of_theta) {
        const float scaled = rounded<T>(rounded<T>(radius * rounded<T>(of_theta)) * std);
        return cast<T>(scaled + mean);
      };
      elements[i + j] = finish(std::cos(theta));
      elements[i + j + kHalf] = finish(std::sin(theta));
    }
  }
  return true;
}

// Pairs.

template <typename T, bool kFused, bool kExponentiated>
bool convert_pairs(const Arguments& arguments, const std::uint32_t* words, const void* input,
                   void* out, std::int64_t count) {
  T* elements = static_cast<T*>(out);
  const auto finish = [&](double sample) {
    const double normal = multiply_add<kFused>(sample, arguments.std, arguments.mean);
    return cast<T>(kExponentiated ? ::exp(normal) : normal);
  };
  if (input != nullptr) {  // samples that were drawn earlier
    for (std::int64_t i = 0; i < count; ++i) {
      elements[i] = finish(static_cast<const double*>(input)[i]);
    }
    return true;
  }
  for (std::int64_t i = 0; i < count; i += 2) {
    const NormalPair pair =
        normal_pair(unit<double>(words + 2 * i), unit<double>(words + 2 * i + 2));
    elements[i] = finish(pair.first);
    elements[i + 1] = finish(pair.second);
  }
  return true;
}

}  // namespace

Kernel normal_blocks(Dtype dtype, const Arguments& arguments) {
  const bool fused = arguments.fused, before_213 = arguments.release != TorchRelease::kTorch213;
  return for_floating(dtype, [&]<typename T>() -> Kernel {
    constexpr int kWords = kUnitWords<Wide<T>>;
    if constexpr (kIsHalf<T>) {
      if (arguments.release == TorchRelease::kTorch211) {
        return {convert_blocks_low_precision<T>, kWords, kBlock};
      }
    }
    if (before_213) {
      return {fused ? convert_blocks<T, true, true> : convert_blocks<T, false, true>, kWords,
              kBlock};
    }
    return {fused ? convert_blocks<T, true, false> : convert_blocks<T, false, false>, kWords,
            kBlock};
  });
}

Kernel normal_pairs(Dtype dtype, const Arguments& arguments) {
  return for_floating(dtype, [&]<typename T>() -> Kernel {
    return {arguments.fused ? convert_pairs<T, true, false> : convert_pairs<T, false, false>, 2, 2};
  });
}

Kernel log_normal_pairs(Dtype dtype, const Arguments& arguments) {
  return for_floating(dtype, [&]<typename T>() -> Kernel {
    return {arguments.fused ? convert_pairs<T, true, true> : convert_pairs<T, false, true>, 2, 2};
  });
}

}  // namespace dist_rng::DIST_RNG_ISA
