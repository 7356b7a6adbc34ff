// uniform_: source ATen/native/cpu/DistributionTemplates.h, uniform_kernel.
#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

template <typename T, bool kFused, bool kBelowHigh>
bool convert(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
             std::int64_t count) {
  using V = Wide<T>;
  const V low = static_cast<V>(arguments.low), high = static_cast<V>(arguments.high);
  const V range = high - low;
  const T low_rounded = cast<T>(arguments.low);
  const V limit = to_float(cast<T>(arguments.high));
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    const V x = unit<V>(words + i * kUnitWords<V>);
    const T value = cast<T>(multiply_add<kFused>(x, range, low));
    // Rounding may reach the upper bound, which is not part of the range.
    elements[i] = kBelowHigh && to_float(value) == limit ? low_rounded : value;
  }
  return true;
}

// torch 2.11 draws a bf16 or f16 with as many random bits as it has.
template <typename T, bool kFused>
bool convert_low_precision(const Arguments& arguments, const std::uint32_t* words, const void*,
                           void* out, std::int64_t count) {
  const float low = to_float(cast<T>(arguments.low)), high = to_float(cast<T>(arguments.high));
  const float range = to_float(cast<T>(high - low));
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::int32_t>(words[i] & ((1u << kDigits<T>)-1));
    const float x = static_cast<float>(bits) * (1.0f / static_cast<float>(1u << kDigits<T>));
    elements[i] = cast<T>(multiply_add<kFused>(x, range, low));
  }
  return true;
}

}  // namespace

Kernel uniform(Dtype dtype, const Arguments& arguments) {
  const bool fused = arguments.fused, torch_211 = arguments.release == TorchRelease::kTorch211;
  return for_floating(dtype, [&]<typename T>() -> Kernel {
    constexpr int kWords = kUnitWords<Wide<T>>;
    if (!torch_211) return {fused ? convert<T, true, true> : convert<T, false, true>, kWords};
    if constexpr (kIsHalf<T>) {
      return {fused ? convert_low_precision<T, true> : convert_low_precision<T, false>, kWords};
    } else {
      return {fused ? convert<T, true, false> : convert<T, false, false>, kWords};
    }
  });
}

}  // namespace dist_rng::DIST_RNG_ISA
