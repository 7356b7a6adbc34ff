// bernoulli_ with one probability and with many, and the mask of fused dropout.
#include "launch.cuh"

namespace dist_rng {

cudaError_t fill_bernoulli(const Job& job, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::BernoulliOf>(job, stream);
}

cudaError_t fill_bernoulli_tensor(const Job& job, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::BernoulliTensorOf>(job, stream);
}

cudaError_t fill_keep(const Job& job, cudaStream_t stream) {
  if (static_cast<Dtype>(job.dtype) != Dtype::kBool) return cudaErrorInvalidValue;
  return DIST_RNG_ISA::launch<std::uint8_t, DIST_RNG_ISA::KeepOf>(job, stream);
}

}  // namespace dist_rng
