// torch 2.11's normal_ of 16 elements and more in bf16 and f16: every step is rounded to the
// dtype.  Source: ATen/native/cpu/DistributionTemplates.h of that release, normal_fill_16.
#include <cmath>

#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

constexpr int kHalf = 8, kBlock = 2 * kHalf;
constexpr double kTwoPi = 2.0f * 3.14159265358979323846;

template <typename T>
inline float rounded(double x) {
  return to_float(cast<T>(x));
}

template <typename T>
inline float rounded(float x) {
  return to_float(cast<T>(x));
}

// As many random bits as the dtype has.
template <typename T>
inline float coarse_unit(std::uint32_t word) {
  constexpr std::uint32_t kOne = 1u << kDigits<T>;
  return static_cast<float>(word & (kOne - 1)) / static_cast<float>(kOne);
}

template <typename T>
bool convert(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
             std::int64_t count) {
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

}  // namespace

Convert normal_blocks_low_precision(Dtype dtype) {
  return dtype == Dtype::kBfloat16 ? convert<Bfloat16> : convert<Float16>;
}

}  // namespace dist_rng::DIST_RNG_ISA
