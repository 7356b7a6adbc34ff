// What library.cu calls: one function per kind; the .cu files hold a few each.
//
// They return cudaErrorInvalidValue where there is no kernel for the dtype.
#pragma once

#if defined(DIST_RNG_CUDA_ON_HOST)
#include DIST_RNG_CUDA_ON_HOST
#else
#include <cuda_runtime.h>
#endif

#include "job.h"

namespace dist_rng {

cudaError_t fill_uniform(const Job& job, cudaStream_t stream);
cudaError_t fill_normal(const Job& job, cudaStream_t stream);
cudaError_t fill_exponential(const Job& job, cudaStream_t stream);
cudaError_t fill_bernoulli(const Job& job, cudaStream_t stream);
cudaError_t fill_bernoulli_tensor(const Job& job, cudaStream_t stream);
cudaError_t fill_keep(const Job& job, cudaStream_t stream);
cudaError_t fill_modulo_32(const Job& job, cudaStream_t stream);
cudaError_t fill_modulo_64(const Job& job, cudaStream_t stream);

}  // namespace dist_rng
