// From a Job to the launch of one of the kernels.
//
// With DIST_RNG_CUDA_ON_HOST, a header of the tests, the kernels run on the host instead, with the
// host's element types.
#pragma once

#if defined(DIST_RNG_CUDA_ON_HOST)
#include DIST_RNG_CUDA_ON_HOST
#else
#include "element.cuh"
#define DIST_RNG_LAUNCH(kernel, grid, stream, ...) \
  kernel<<<grid, kBlock, 0, stream>>>(__VA_ARGS__)
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../cpp/dtype.h"
#include "fills.h"
#include "kernels.cuh"

namespace dist_rng {

namespace DIST_RNG_ISA {

inline unsigned blocks_for(std::int64_t threads) {
  constexpr std::int64_t kEnough = 1 << 16;  // the rest by striding
  return static_cast<unsigned>(std::clamp((threads + kBlock - 1) / kBlock, std::int64_t{1},
                                          kEnough));
}

inline Box box_of(const Job& job) {
  Box box;
  box.first = job.first;
  box.count = job.count;
  box.draw = job.draw - job.start;
  box.local = job.local;
  box.numel = job.stop - job.start;
  box.threads = job.threads;
  box.reach = {job.unroll, job.vector};
  box.by_threads = Divider(job.threads);
  box.dims = job.dims;
  for (int d = 0; d < job.dims; ++d) {
    const JobDim& dim = job.dim[d];
    box.dim[d] = {Divider(dim.size), Divider(dim.length), dim.size,        dim.length,
                  dim.period,        dim.draw_stride,     dim.local_stride};
  }
  return box;
}

// Whether the job's elements are consecutive draws; then they are these.
inline bool is_range(const Job& job, Range& range) {
  const bool single = job.dims == 0;
  if (!single && (job.dims != 1 || job.dim[0].draw_stride != 1 ||
                  job.dim[0].length != job.dim[0].size)) {
    return false;
  }
  range.stride = single ? 1 : job.dim[0].local_stride;
  const std::int64_t first = job.draw + job.first;
  range.first = std::max(first, job.start) - job.start;
  range.last = std::min(first + job.count, job.stop) - job.start;
  range.local = job.local + (job.first + range.first + job.start - first) * range.stride;
  range.threads = job.threads;
  range.reach = {job.unroll, job.vector};
  return true;
}

template <typename T, template <typename> typename Formula>
cudaError_t launch(const Job& job, cudaStream_t stream) {
  const PhiloxArguments arguments{job.a, job.b, job.modulus, job.base};
  const Store<T> store{reinterpret_cast<T*>(job.data),
                       reinterpret_cast<const Wide<T>*>(job.probabilities)};
  const State state{job.seed, job.offset,
                    reinterpret_cast<const std::uint64_t*>(job.seed_address),
                    reinterpret_cast<const std::uint64_t*>(job.offset_address),
                    static_cast<std::uint64_t>(job.after)};
  Range range;
  const bool consecutive = is_range(job, range);
  const std::int64_t draws = consecutive ? range.last - range.first : job.count;
  if (draws <= 0) return cudaSuccess;
  // Kernels that no job needs are not compiled.
  constexpr bool kQuads = std::is_same_v<Formula<T>, BernoulliTensorOf<T>>;
  constexpr bool kVectors = kQuads || std::is_same_v<Formula<T>, KeepOf<T>>;
  if (kVectors && consecutive && job.vector != 0) {
    const dim3 grid(blocks_for(draws / range.reach.share() + 2));
    if constexpr (kVectors) {
      DIST_RNG_LAUNCH((vectors_kernel<T, Formula<T>>), grid, stream, store, arguments, state, range,
                      Divider(job.threads));
    }
  } else if (!kQuads && consecutive && job.vector == 0 && draws > job.threads) {
    // Where the reproduced GPU has fewer threads than this one, calls are shared out over y.
    const std::int64_t calls = (draws - 1) / (job.threads * Formula<T>::kUnroll) + 1;
    const auto rows = std::clamp((std::int64_t{1} << 18) / job.threads, std::int64_t{1}, calls);
    const dim3 grid(static_cast<unsigned>(job.threads / kBlock), static_cast<unsigned>(rows));
    if constexpr (!kQuads) {
      DIST_RNG_LAUNCH((strides_kernel<T, Formula<T>>), grid, stream, store, arguments, state, range);
    }
  } else {
    const dim3 grid(blocks_for(draws));
    DIST_RNG_LAUNCH((boxes_kernel<T, Formula<T>>), grid, stream, store, arguments, state,
                    box_of(job));
  }
  return cudaGetLastError();
}

template <template <typename> typename Formula>
cudaError_t launch_floating(const Job& job, cudaStream_t stream) {
  switch (static_cast<Dtype>(job.dtype)) {
    case Dtype::kFloat32:
      return launch<float, Formula>(job, stream);
    case Dtype::kFloat64:
      return launch<double, Formula>(job, stream);
    case Dtype::kBfloat16:
      return launch<Bfloat16, Formula>(job, stream);
    case Dtype::kFloat16:
      return launch<Float16, Formula>(job, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// Signed integers have the bits of unsigned ones, and zero and one those of a bool.
template <template <typename> typename Formula>
cudaError_t launch_every(const Job& job, cudaStream_t stream) {
  switch (static_cast<Dtype>(job.dtype)) {
    case Dtype::kInt8:
    case Dtype::kUint8:
    case Dtype::kBool:
      return launch<std::uint8_t, Formula>(job, stream);
    case Dtype::kInt16:
    case Dtype::kUint16:
      return launch<std::uint16_t, Formula>(job, stream);
    case Dtype::kInt32:
    case Dtype::kUint32:
      return launch<std::uint32_t, Formula>(job, stream);
    case Dtype::kInt64:
    case Dtype::kUint64:
      return launch<std::uint64_t, Formula>(job, stream);
    default:
      return launch_floating<Formula>(job, stream);
  }
}

}  // namespace DIST_RNG_ISA
}  // namespace dist_rng
