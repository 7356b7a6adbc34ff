// bernoulli_ with one probability and with many, and the mask of fused dropout.
#include "launch.cuh"

namespace dist_rng {

cudaError_t fill_bernoulli(const FillParams& params, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::BernoulliOf>(params, stream);
}

cudaError_t fill_bernoulli_tensor(const FillParams& params, cudaStream_t stream) {
  return DIST_RNG_ISA::launch_every<DIST_RNG_ISA::BernoulliTensorOf>(params, stream);
}

cudaError_t fill_dropout_mask(const FillParams& params, cudaStream_t stream) {
  if (static_cast<Dtype>(params.dtype) != Dtype::kBool) return cudaErrorInvalidValue;
  return DIST_RNG_ISA::launch<std::uint8_t, DIST_RNG_ISA::DropoutMaskOf>(params, stream);
}

}  // namespace dist_rng
