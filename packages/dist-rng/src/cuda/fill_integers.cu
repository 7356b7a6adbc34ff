// random_ and randint.
#include "launch.cuh"

namespace dist_rng {

cudaError_t fill_modulo_32(const Job& job, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::Modulo32Of>(job, stream);
}

cudaError_t fill_modulo_64(const Job& job, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::Modulo64Of>(job, stream);
}

}  // namespace dist_rng
