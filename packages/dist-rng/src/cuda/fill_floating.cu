// uniform_, normal_ and exponential_.
#include "launch.cuh"

namespace dist_rng {

cudaError_t fill_uniform(const FillParams& params, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_floating<DIST_RNG_ISA::UniformOf>(params, stream);
}

cudaError_t fill_normal(const FillParams& params, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_floating<DIST_RNG_ISA::NormalOf>(params, stream);
}

cudaError_t fill_exponential(const FillParams& params, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_floating<DIST_RNG_ISA::ExponentialOf>(params, stream);
}

}  // namespace dist_rng
