// random_ and randint.
#include "launch.cuh"

namespace dist_rng {

cudaError_t fill_modulo_32(const FillParams& params, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::Modulo32Of>(params, stream);
}

cudaError_t fill_modulo_64(const FillParams& params, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::Modulo64Of>(params, stream);
}

}  // namespace dist_rng
