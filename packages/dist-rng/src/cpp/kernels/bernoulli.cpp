// bernoulli_: source ATen/native/cpu/DistributionTemplates.h, bernoulli_kernel.
#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

// One probability: a double is drawn and compared, whatever the dtype.
template <typename T>
bool convert(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
             std::int64_t count) {
  // n * 2^-53 < p exactly where n < ceil(p * 2^53): the scaling is exact.
  const auto limit = static_cast<std::int64_t>(__builtin_ceil(arguments.p * 0x1p53));
  const T zero = cast<T>(0), one = cast<T>(1);
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto n = static_cast<std::int64_t>(low_53_bits(words + 2 * i));
    elements[i] = n < limit ? one : zero;
  }
  return true;
}

// A tensor of probabilities: drawn in float, or in double for double probabilities.
template <typename T, typename P>
bool convert_tensor(const Arguments&, const std::uint32_t* words, const void* input, void* out,
                    std::int64_t count) {
  using V = Wide<P>;
  const T zero = cast<T>(0), one = cast<T>(1);
  const P* probabilities = static_cast<const P*>(input);
  T* elements = static_cast<T*>(out);
  unsigned invalid = 0;  // a number: a bool would keep the loop scalar
  for (std::int64_t i = 0; i < count; ++i) {
    const V p = to_float(probabilities[i]);
    invalid |= !(p >= 0) | !(p <= 1);
    elements[i] = unit<V>(words + i * kUnitWords<V>) < p ? one : zero;
  }
  return invalid == 0;
}

}  // namespace

Kernel bernoulli(Dtype dtype, const Arguments&) {
  return for_common(dtype, []<typename T>() -> Kernel { return {convert<T>, 2}; });
}

Kernel bernoulli_tensor(Dtype dtype, Dtype probabilities) {
  return for_common(dtype, [&]<typename T>() -> Kernel {
    return for_floating(probabilities, []<typename P>() -> Kernel {
      return {convert_tensor<T, P>, kUnitWords<Wide<P>>};
    });
  });
}

}  // namespace dist_rng::DIST_RNG_ISA
