// exponential_: source ATen/native/cpu/DistributionTemplates.h, exponential_kernel.
#include <cmath>

#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

template <typename T>
bool convert(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
             std::int64_t count) {
  const double scale = -1.0 / arguments.rate;
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    // The C library's log1p, as torch calls it: no other one has its bits.
    elements[i] = cast<T>(scale * ::log1p(-unit<double>(words + 2 * i)));
  }
  return true;
}

}  // namespace

Kernel exponential(Dtype dtype, const Arguments&) {
  return for_floating(dtype, []<typename T>() -> Kernel { return {convert<T>, 2}; });
}

}  // namespace dist_rng::DIST_RNG_ISA
