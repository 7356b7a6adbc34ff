// uniform_, normal_ and exponential_.
#include "launch.cuh"

namespace dist_rng {

cudaError_t fill_uniform(const Job& job, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_floating<DIST_RNG_ISA::UniformOf>(job, stream);
}

cudaError_t fill_normal(const Job& job, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_floating<DIST_RNG_ISA::NormalOf>(job, stream);
}

cudaError_t fill_exponential(const Job& job, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_floating<DIST_RNG_ISA::ExponentialOf>(job, stream);
}

}  // namespace dist_rng
