// normal_'s serial path: source ATen/core/DistributionsHelper.h, normal_distribution<double>.
#include <cmath>

#include "element.h"
#include "kernels.h"
#include "../normal_pair.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

template <typename T, bool kFused>
bool convert(const Arguments& arguments, const std::uint32_t* words, const void* input, void* out,
             std::int64_t count) {
  T* elements = static_cast<T*>(out);
  const auto finish = [&](double sample) {
    return cast<T>(multiply_add<kFused>(sample, arguments.std, arguments.mean));
  };
  if (input != nullptr) {  // samples that were drawn earlier
    for (std::int64_t i = 0; i < count; ++i) {
      elements[i] = finish(static_cast<const double*>(input)[i]);
    }
    return true;
  }
  for (std::int64_t i = 0; i < count; i += 2) {
    const NormalPair pair = normal_pair(unit<double>(words + 2 * i), unit<double>(words + 2 * i + 2));
    elements[i] = finish(pair.first);
    elements[i + 1] = finish(pair.second);
  }
  return true;
}

}  // namespace

Kernel normal_pairs(Dtype dtype, const Arguments& arguments) {
  return for_floating(dtype, [&]<typename T>() -> Kernel {
    return {arguments.fused ? convert<T, true> : convert<T, false>, 2, 2};
  });
}

}  // namespace dist_rng::DIST_RNG_ISA
