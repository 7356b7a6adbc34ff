// The library's three symbols; cuda/library.py loads them with ctypes.
#include "../cpp/philox/launch.h"
#include "fill_params.h"

namespace {

using namespace dist_rng;

cudaError_t fill(const FillParams& params, cudaStream_t stream) {
  switch (static_cast<PhiloxKind>(params.kind)) {
    case PhiloxKind::kUniform:
      return fill_uniform(params, stream);
    case PhiloxKind::kNormal:
      return fill_normal(params, stream);
    case PhiloxKind::kExponential:
      return fill_exponential(params, stream);
    case PhiloxKind::kBernoulli:
      return fill_bernoulli(params, stream);
    case PhiloxKind::kBernoulliTensor:
      return fill_bernoulli_tensor(params, stream);
    case PhiloxKind::kDropoutMask:
      return fill_dropout_mask(params, stream);
    case PhiloxKind::kModulo32:
      return fill_modulo_32(params, stream);
    case PhiloxKind::kModulo64:
      return fill_modulo_64(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

extern "C" {

// Bytes of a FillParams: Python compares them to recognise a library of another version.
int dist_rng_params_bytes() { return static_cast<int>(sizeof(FillParams)); }

// Launches on `stream` of `params->device`, which the caller has made current in its own runtime.
// Returns a cudaError_t.
int dist_rng_fill(const FillParams* params, void* stream) {
  // This library has its own CUDA runtime: both use the device's one primary context.
  const cudaError_t error = cudaSetDevice(params->device);
  if (error != cudaSuccess) {
    cudaGetLastError();  // otherwise the next launch would return this error
    return error;
  }
  return fill(*params, static_cast<cudaStream_t>(stream));
}

const char* dist_rng_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
