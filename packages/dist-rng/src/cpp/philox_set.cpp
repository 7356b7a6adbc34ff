#include "kernels/philox_set.h"

#include "kernels/kernel_set.h"

namespace dist_rng {

const PhiloxSet& philox_set() {
#if defined(__x86_64__)
  const KernelSet* chosen = &kernel_set();
  if (chosen == &avx512::kKernels) return avx512::kPhilox;
  if (chosen == &avx2::kKernels) return avx2::kPhilox;
#endif
  return baseline::kPhilox;
}

}  // namespace dist_rng
