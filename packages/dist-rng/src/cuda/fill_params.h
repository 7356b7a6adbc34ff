// The parameters of one kernel launch, and the functions that launch: one per kind of draw.
//
// FillParams is plain data with the layout of FillParams in cuda/library.py. The functions return
// cudaErrorInvalidValue where there is no kernel for the dtype; each .cu file defines a few.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dist_rng {

constexpr int kMaxDims = 8;

// Index k of the dim is index k / length * period + k % length of the global dim: pieces of one
// length, evenly spaced.
struct DimParams {
  std::int64_t size;
  std::int64_t length;
  std::int64_t period;
  std::int64_t draw_stride;
  std::int64_t local_stride;
};

// The elements `first` .. `first + count` of a box, counted with the last dim fastest, as far as
// one launch of torch draws them.
struct FillParams {
  std::uint64_t data;           // address of the local tensor's first element
  std::uint64_t probabilities;  // address; 0 except for Bernoulli of a tensor
  std::int32_t kind;            // PhiloxKind
  std::int32_t dtype;           // Dtype
  std::int32_t unroll;          // AccessPattern
  std::int32_t vector;
  double a;                     // PhiloxArguments
  double b;
  std::uint64_t modulus;
  std::int64_t base;
  std::uint64_t seed;
  std::uint64_t offset;          // the generator's before the draw
  std::uint64_t seed_address;    // on the device, 0 unless a graph is captured; then the two
  std::uint64_t offset_address;  // values above are not used
  std::int64_t relative_offset;  // the launch's offset minus the generator's
  std::int64_t start;            // the launch: PhiloxLaunch
  std::int64_t stop;
  std::int64_t threads;
  std::int64_t first;
  std::int64_t count;
  std::int64_t draw;   // draw index of element 0
  std::int64_t local;  // offset of element 0 in the local tensor, in elements
  std::int32_t device;
  std::int32_t dims;
  DimParams dim[kMaxDims];
};

cudaError_t fill_uniform(const FillParams& params, cudaStream_t stream);
cudaError_t fill_normal(const FillParams& params, cudaStream_t stream);
cudaError_t fill_exponential(const FillParams& params, cudaStream_t stream);
cudaError_t fill_bernoulli(const FillParams& params, cudaStream_t stream);
cudaError_t fill_bernoulli_tensor(const FillParams& params, cudaStream_t stream);
cudaError_t fill_dropout_mask(const FillParams& params, cudaStream_t stream);
cudaError_t fill_modulo_32(const FillParams& params, cudaStream_t stream);
cudaError_t fill_modulo_64(const FillParams& params, cudaStream_t stream);

}  // namespace dist_rng
