// Three kernels, for any formula of philox/formulas.h. They differ in how they find their elements:
//
//   strides_kernel   a range of draws longer than a stride: torch's loop, one call for all lanes
//   vectors_kernel   a range of draws of a kernel that draws neighbours: one call for up to four
//   boxes_kernel     any box: one call for one element
//
// Include it after the element types, as philox/formulas.h asks.
#pragma once

#include <cassert>
#include <cstdint>

#include "../cpp/philox/formulas.h"
#include "../cpp/philox/launch.h"
#include "fill_params.h"

#if defined(__CUDACC__)
#define DIST_RNG_HOST_DEVICE __host__ __device__
#else
#define DIST_RNG_HOST_DEVICE
#endif

namespace dist_rng {

// Division by a number that is the same for a whole launch, as a multiplication.
//
// Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
struct Divider {
  std::uint64_t magic;
  std::int32_t shift;

  Divider() = default;

  // For divisors from 1 to 2^63.
  explicit Divider(std::int64_t divisor) : shift(0) {
    const auto d = static_cast<std::uint64_t>(divisor);
    while ((std::uint64_t{1} << shift) < d) ++shift;
    const unsigned __int128 rest = (static_cast<unsigned __int128>(1) << shift) - d;
    magic = static_cast<std::uint64_t>((rest << 64) / d + 1);
  }

  // Divides a number that is not negative.
  DIST_RNG_HOST_DEVICE std::int64_t operator()(std::int64_t number) const {
    const auto n = static_cast<std::uint64_t>(number);
#if defined(__CUDA_ARCH__)
    const std::uint64_t high = __umul64hi(magic, n);
#else
    const auto product = static_cast<unsigned __int128>(magic) * n;
    const auto high = static_cast<std::uint64_t>(product >> 64);
#endif
    return static_cast<std::int64_t>((high + n) >> shift);
  }
};

namespace DIST_RNG_ISA {

constexpr int kBlock = 256;

// The generator's state, read from device memory when a captured graph is replayed.
struct GeneratorState {
  std::uint64_t seed, offset;
  const std::uint64_t* seed_address;
  const std::uint64_t* offset_address;
  std::int64_t relative_offset;

  DIST_RNG_INLINE std::uint64_t key() const { return seed_address ? *seed_address : seed; }
  DIST_RNG_INLINE std::uint64_t count() const {
    return ((offset_address ? *offset_address : offset) +
            static_cast<std::uint64_t>(relative_offset)) / 4;
  }
};

// Draws first <= index < last of the launch, evenly spaced in the local tensor.
struct DrawRange {
  std::int64_t first, last;
  std::int64_t local, stride;
  std::int64_t threads;
  AccessPattern access;
};

// A box of the local tensor: one progression of indices per dim.
struct KernelBox {
  struct Dim {
    Divider size, length;
    std::int64_t size_value, length_value, period, draw_stride, local_stride;
  };
  std::int64_t first, count;
  std::int64_t draw, local;  // of element 0; draws are counted from the launch's first
  std::int64_t numel;        // draws of the launch
  std::int64_t threads;
  AccessPattern access;
  Divider by_threads;
  int dims;
  Dim dim[kMaxDims];
};

template <typename T>
struct Store {
  T* data;
  const Wide<T>* probabilities;

  template <typename Formula>
  DIST_RNG_INLINE void operator()(const Formula& formula, const Words& words, int lane,
                                  std::int64_t offset) const {
    if constexpr (std::is_same_v<Formula, BernoulliTensorOf<T>>) {
      const Wide<T> probability = probabilities[offset];
      assert(0 <= probability && probability <= 1);
      data[offset] = formula(words, lane, probability);
    } else {
      data[offset] = formula(words, lane);
    }
  }
};

// Launched with the threads of the launch that is reproduced.
template <typename T, typename Formula>
__global__ void __launch_bounds__(kBlock, 4)
    strides_kernel(Store<T> store, PhiloxArguments arguments, GeneratorState state,
                   DrawRange range) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  const Formula formula(arguments);
  const std::uint64_t key = state.key(), count = state.count();
  const std::int64_t span = range.threads * Formula::kUnroll;
  const std::int64_t first_call = range.first / span, last_call = (range.last - 1) / span;
  for (std::int64_t call = first_call + blockIdx.y; call <= last_call; call += gridDim.y) {
    const Words words = philox_call(key, count + static_cast<std::uint64_t>(call),
                                    static_cast<std::uint64_t>(thread));
#pragma unroll
    for (int lane = 0; lane < Formula::kUnroll; ++lane) {
      const std::int64_t index = call * span + lane * range.threads + thread;
      if (index >= range.first && index < range.last) {
        store(formula, words, lane, range.local + (index - range.first) * range.stride);
      }
    }
  }
}

template <typename T, typename Formula>
__global__ void __launch_bounds__(kBlock, 4)
    vectors_kernel(Store<T> store, PhiloxArguments arguments, GeneratorState state, DrawRange range,
                   Divider by_threads) {
  const Formula formula(arguments);
  const std::uint64_t key = state.key(), count = state.count();
  const int per_call = range.access.elements_per_call(), shift = per_call / 2;
  const std::int64_t last_group = (range.last - 1) >> shift;
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  std::int64_t group = (range.first >> shift) + std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  for (; group <= last_group; group += step) {
    const WordSource source =
        word_source_of(range.access, range.threads, group << shift, by_threads);
    const Words words = philox_call(key, count + static_cast<std::uint64_t>(source.call),
                                    static_cast<std::uint64_t>(source.thread));
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const std::int64_t index = (group << shift) + lane;
      if (lane < per_call && index >= range.first && index < range.last) {
        store(formula, words, lane, range.local + (index - range.first) * range.stride);
      }
    }
  }
}

template <typename T, typename Formula>
__global__ void __launch_bounds__(kBlock, 4)
    boxes_kernel(Store<T> store, PhiloxArguments arguments, GeneratorState state, KernelBox box) {
  const Formula formula(arguments);
  const std::uint64_t key = state.key(), count = state.count();
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  std::int64_t element = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  for (; element < box.count; element += step) {
    std::int64_t rest = box.first + element, draw = box.draw, local = box.local;
    for (int d = box.dims - 1; d >= 0; --d) {
      const KernelBox::Dim& dim = box.dim[d];
      // The outermost dim has the rest: it needs no division.
      const std::int64_t outer = d == 0 ? 0 : dim.size(rest);
      const std::int64_t index = rest - outer * dim.size_value;
      rest = outer;
      const std::int64_t piece = dim.length(index);
      draw += (piece * dim.period + index - piece * dim.length_value) * dim.draw_stride;
      local += index * dim.local_stride;
    }
    if (draw < 0 || draw >= box.numel) continue;  // another launch draws it
    const WordSource source = word_source_of(box.access, box.threads, draw, box.by_threads);
    const Words words = philox_call(key, count + static_cast<std::uint64_t>(source.call),
                                    static_cast<std::uint64_t>(source.thread));
    store(formula, words, source.lane, local);
  }
}

}  // namespace DIST_RNG_ISA
}  // namespace dist_rng
