// exponential_, cauchy_ and geometric_: the inverse of the distribution's function, of one uniform
// in double per element.
//
// Sources: ATen/native/cpu/DistributionTemplates.h, exponential_kernel, cauchy_kernel and
// geometric_kernel; ATen/core/TransformationHelper.h. The C library's log, log1p and tan are
// called, as torch does: no others have their bits.
#include <cmath>

#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

constexpr int kWords = 2;  // of a uniform in double

template <typename T>
bool convert_exponential(const Arguments& arguments, const std::uint32_t* words, const void*,
                         void* out, std::int64_t count) {
  const double scale = -1.0 / arguments.rate;
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    elements[i] = cast<T>(scale * ::log1p(-unit<double>(words + kWords * i)));
  }
  return true;
}

template <typename T, bool kFused>
bool convert_cauchy(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
                    std::int64_t count) {
  constexpr double kPi = 3.14159265358979323846;
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    const double tangent = ::tan(kPi * (unit<double>(words + kWords * i) - 0.5));
    elements[i] = cast<T>(multiply_add<kFused>(arguments.sigma, tangent, arguments.median));
  }
  return true;
}

template <typename T>
bool convert_geometric(const Arguments& arguments, const std::uint32_t* words, const void*,
                       void* out, std::int64_t count) {
  const double log_of_failure = ::log1p(-arguments.p);
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    elements[i] = cast<T>(::ceil(::log(unit<double>(words + kWords * i)) / log_of_failure));
  }
  return true;
}

}  // namespace

Kernel exponential(Dtype dtype, const Arguments&) {
  return for_floating(dtype, []<typename T>() -> Kernel { return {convert_exponential<T>, kWords}; });
}

Kernel cauchy(Dtype dtype, const Arguments& arguments) {
  return for_floating(dtype, [&]<typename T>() -> Kernel {
    return {arguments.fused ? convert_cauchy<T, true> : convert_cauchy<T, false>, kWords};
  });
}

Kernel geometric(Dtype dtype, const Arguments&) {
  return for_common(dtype, []<typename T>() -> Kernel { return {convert_geometric<T>, kWords}; });
}

}  // namespace dist_rng::DIST_RNG_ISA
