// Launches one of the kernels for a FillParams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../cpp/dtype.h"
#include "element.cuh"
#include "fill_params.h"
#include "kernels.cuh"

namespace dist_rng {

namespace DIST_RNG_ISA {

inline unsigned blocks_for(std::int64_t threads) {
  constexpr std::int64_t kMaxBlocks = 1 << 16;  // a block strides over the rest
  return static_cast<unsigned>(std::clamp((threads + kBlock - 1) / kBlock, std::int64_t{1},
                                          kMaxBlocks));
}

inline KernelBox box_of(const FillParams& params) {
  KernelBox box;
  box.first = params.first;
  box.count = params.count;
  box.draw = params.draw - params.start;
  box.local = params.local;
  box.numel = params.stop - params.start;
  box.threads = params.threads;
  box.access = {params.unroll, params.vector};
  box.by_threads = Divider(params.threads);
  box.dims = params.dims;
  for (int d = 0; d < params.dims; ++d) {
    const DimParams& dim = params.dim[d];
    box.dim[d] = {Divider(dim.size), Divider(dim.length), dim.size,        dim.length,
                  dim.period,        dim.draw_stride,     dim.local_stride};
  }
  return box;
}

// Whether the elements are consecutive draws; writes them to `range` if so.
inline bool is_range(const FillParams& params, DrawRange& range) {
  const bool single = params.dims == 0;
  if (!single && (params.dims != 1 || params.dim[0].draw_stride != 1 ||
                  params.dim[0].length != params.dim[0].size)) {
    return false;
  }
  range.stride = single ? 1 : params.dim[0].local_stride;
  const std::int64_t first = params.draw + params.first;
  range.first = std::max(first, params.start) - params.start;
  range.last = std::min(first + params.count, params.stop) - params.start;
  range.local = params.local + (params.first + range.first + params.start - first) * range.stride;
  range.threads = params.threads;
  range.access = {params.unroll, params.vector};
  return true;
}

template <typename T, template <typename> typename Formula>
cudaError_t launch(const FillParams& params, cudaStream_t stream) {
  const PhiloxArguments arguments{params.a, params.b, params.modulus, params.base};
  const Store<T> store{reinterpret_cast<T*>(params.data),
                       reinterpret_cast<const Wide<T>*>(params.probabilities)};
  const GeneratorState state{params.seed, params.offset,
                    reinterpret_cast<const std::uint64_t*>(params.seed_address),
                    reinterpret_cast<const std::uint64_t*>(params.offset_address),
                    params.relative_offset};
  DrawRange range;
  const bool consecutive = is_range(params, range);
  const std::int64_t draws = consecutive ? range.last - range.first : params.count;
  if (draws <= 0) return cudaSuccess;
  // Kernels that no draw needs are not compiled.
  constexpr bool kQuads = std::is_same_v<Formula<T>, BernoulliTensorOf<T>>;
  constexpr bool kVectors = kQuads || std::is_same_v<Formula<T>, DropoutMaskOf<T>>;
  if (kVectors && consecutive && params.vector != 0) {
    const dim3 grid(blocks_for(draws / range.access.elements_per_call() + 2));
    if constexpr (kVectors) {
      vectors_kernel<T, Formula<T>><<<grid, kBlock, 0, stream>>>(store, arguments, state, range,
                                                                 Divider(params.threads));
    }
  } else if (!kQuads && consecutive && params.vector == 0 && draws > params.threads) {
    // Where the reproduced GPU has fewer threads than this one, calls are distributed over y.
    const std::int64_t calls = (draws - 1) / (params.threads * Formula<T>::kUnroll) + 1;
    const auto rows = std::clamp((std::int64_t{1} << 18) / params.threads, std::int64_t{1}, calls);
    const dim3 grid(static_cast<unsigned>(params.threads / kBlock), static_cast<unsigned>(rows));
    if constexpr (!kQuads) {
      strides_kernel<T, Formula<T>><<<grid, kBlock, 0, stream>>>(store, arguments, state, range);
    }
  } else {
    const dim3 grid(blocks_for(draws));
    boxes_kernel<T, Formula<T>><<<grid, kBlock, 0, stream>>>(store, arguments, state,
                                                             box_of(params));
  }
  return cudaGetLastError();
}

template <template <typename> typename Formula>
cudaError_t launch_floating(const FillParams& params, cudaStream_t stream) {
  switch (static_cast<Dtype>(params.dtype)) {
    case Dtype::kFloat32:
      return launch<float, Formula>(params, stream);
    case Dtype::kFloat64:
      return launch<double, Formula>(params, stream);
    case Dtype::kBfloat16:
      return launch<Bfloat16, Formula>(params, stream);
    case Dtype::kFloat16:
      return launch<Float16, Formula>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// Signed integers have the bits of unsigned ones, and false and true those of 0 and 1.
template <template <typename> typename Formula>
cudaError_t launch_every(const FillParams& params, cudaStream_t stream) {
  switch (static_cast<Dtype>(params.dtype)) {
    case Dtype::kInt8:
    case Dtype::kUint8:
    case Dtype::kBool:
      return launch<std::uint8_t, Formula>(params, stream);
    case Dtype::kInt16:
    case Dtype::kUint16:
      return launch<std::uint16_t, Formula>(params, stream);
    case Dtype::kInt32:
    case Dtype::kUint32:
      return launch<std::uint32_t, Formula>(params, stream);
    case Dtype::kInt64:
    case Dtype::kUint64:
      return launch<std::uint64_t, Formula>(params, stream);
    default:
      return launch_floating<Formula>(params, stream);
  }
}

}  // namespace DIST_RNG_ISA
}  // namespace dist_rng
