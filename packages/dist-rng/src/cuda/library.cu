// The library's three symbols; cuda_library.py loads it by ctypes.
#include "../cpp/philox_draw.h"
#include "fills.h"

namespace {

using namespace dist_rng;

cudaError_t fill(const Job& job, cudaStream_t stream) {
  switch (static_cast<PhiloxKind>(job.kind)) {
    case PhiloxKind::kUniform:
      return fill_uniform(job, stream);
    case PhiloxKind::kNormal:
      return fill_normal(job, stream);
    case PhiloxKind::kExponential:
      return fill_exponential(job, stream);
    case PhiloxKind::kBernoulli:
      return fill_bernoulli(job, stream);
    case PhiloxKind::kBernoulliTensor:
      return fill_bernoulli_tensor(job, stream);
    case PhiloxKind::kKeep:
      return fill_keep(job, stream);
    case PhiloxKind::kModulo32:
      return fill_modulo_32(job, stream);
    case PhiloxKind::kModulo64:
      return fill_modulo_64(job, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

extern "C" {

// Bytes of a Job, so that Python can tell that it speaks to the library it was built with.
int dist_rng_job_bytes() { return static_cast<int>(sizeof(Job)); }

// Launches on `stream` of `job->device`, which the caller has made current in its own runtime.
// Returns a cudaError_t.
int dist_rng_fill(const Job* job, void* stream) {
  // This library has a CUDA runtime of its own: both use the device's one primary context.
  const cudaError_t chosen = cudaSetDevice(job->device);
  if (chosen != cudaSuccess) return chosen;
  return fill(*job, static_cast<cudaStream_t>(stream));
}

const char* dist_rng_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
