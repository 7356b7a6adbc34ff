// Three kernels, for any formula of philox_values.h. They differ in how they find their elements:
//
//   strides_kernel   a range of draws longer than a stride: torch's own loop, one call for all lanes
//   vectors_kernel   a range of draws of a kernel that takes neighbours: one call for up to four
//   boxes_kernel     any box: one call for one element
#pragma once

#include <cassert>
#include <cstdint>

#include "../cpp/philox_map.h"
#include "../cpp/philox_values.h"
#include "divider.h"
#include "job.h"

namespace dist_rng::DIST_RNG_ISA {

constexpr int kBlock = 256;

// The generator, read where it lies when a captured graph is replayed.
struct State {
  std::uint64_t seed, offset;
  const std::uint64_t* seed_address;
  const std::uint64_t* offset_address;
  std::uint64_t after;

  DIST_RNG_INLINE std::uint64_t key() const { return seed_address ? *seed_address : seed; }
  DIST_RNG_INLINE std::uint64_t count() const {
    return ((offset_address ? *offset_address : offset) + after) / 4;
  }
};

// Draws first <= index < last of the launch, evenly spaced in the local tensor.
struct Range {
  std::int64_t first, last;
  std::int64_t local, stride;
  std::int64_t threads;
  PhiloxReach reach;
};

struct Box {
  struct Dim {
    Divider size, length;
    std::int64_t size_value, length_value, period, draw_stride, local_stride;
  };
  std::int64_t first, count;
  std::int64_t draw, local;  // of element 0; draws count from the launch's first
  std::int64_t numel;        // draws of the launch
  std::int64_t threads;
  PhiloxReach reach;
  Divider by_threads;
  int dims;
  Dim dim[kJobDims];
};

template <typename T>
struct Store {
  T* data;
  const Wide<T>* probabilities;

  template <typename Formula>
  DIST_RNG_INLINE void operator()(const Formula& formula, const Words& words, int lane,
                                std::int64_t place) const {
    if constexpr (std::is_same_v<Formula, BernoulliTensorOf<T>>) {
      const Wide<T> probability = probabilities[place];
      assert(0 <= probability && probability <= 1);
      data[place] = formula(words, lane, probability);
    } else {
      data[place] = formula(words, lane);
    }
  }
};

// Launched with the very threads of the launch that is reproduced.
template <typename T, typename Formula>
__global__ void __launch_bounds__(kBlock, 4)
    strides_kernel(Store<T> store, PhiloxArguments arguments, State state, Range range) {
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
    vectors_kernel(Store<T> store, PhiloxArguments arguments, State state, Range range,
                   Divider by_threads) {
  const Formula formula(arguments);
  const std::uint64_t key = state.key(), count = state.count();
  const int share = range.reach.share(), shift = share / 2;
  const std::int64_t last_group = (range.last - 1) >> shift;
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  std::int64_t group = (range.first >> shift) + std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  for (; group <= last_group; group += step) {
    const PhiloxPlace place = place_of(range.reach, range.threads, group << shift, by_threads);
    const Words words = philox_call(key, count + static_cast<std::uint64_t>(place.call),
                                    static_cast<std::uint64_t>(place.thread));
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const std::int64_t index = (group << shift) + lane;
      if (lane < share && index >= range.first && index < range.last) {
        store(formula, words, lane, range.local + (index - range.first) * range.stride);
      }
    }
  }
}

template <typename T, typename Formula>
__global__ void __launch_bounds__(kBlock, 4)
    boxes_kernel(Store<T> store, PhiloxArguments arguments, State state, Box box) {
  const Formula formula(arguments);
  const std::uint64_t key = state.key(), count = state.count();
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  std::int64_t element = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  for (; element < box.count; element += step) {
    std::int64_t rest = box.first + element, draw = box.draw, local = box.local;
    for (int d = box.dims - 1; d >= 0; --d) {
      const Box::Dim& dim = box.dim[d];
      // The outermost dim takes what is left: it needs no division.
      const std::int64_t outer = d == 0 ? 0 : dim.size(rest);
      const std::int64_t held = rest - outer * dim.size_value;
      rest = outer;
      const std::int64_t piece = dim.length(held);
      draw += (piece * dim.period + held - piece * dim.length_value) * dim.draw_stride;
      local += held * dim.local_stride;
    }
    if (draw < 0 || draw >= box.numel) continue;  // another launch draws it
    const PhiloxPlace place = place_of(box.reach, box.threads, draw, box.by_threads);
    const Words words = philox_call(key, count + static_cast<std::uint64_t>(place.call),
                                    static_cast<std::uint64_t>(place.thread));
    store(formula, words, place.lane, local);
  }
}

}  // namespace dist_rng::DIST_RNG_ISA
