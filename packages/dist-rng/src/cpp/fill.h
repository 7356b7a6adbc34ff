// Fills a local tensor with its part of one device's draws: one function per way of drawing.
//
// Each leaves `state` where the one device would have left it, whatever the local tensor holds.
// Pointers are to the local tensor's first element; its strides are in the grid.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "kernels/kernel_set.h"
#include "torch_state.h"
#include "walk.h"

namespace dist_rng {

struct Target {
  void* data;
  Dtype dtype;
  const Grid& grid;
  std::int64_t global_numel;
};

// Ops where element i takes the words from i * kernel.words: all but normal_.  `input` has the
// target's strides, and is null where the op has none.  False if the kernel refused an input.
bool fill_elements(TorchState& state, const Target& target, const Kernel& kernel,
                   const Arguments& arguments, const void* input, std::size_t input_size);

// normal_ of a contiguous global tensor of 16 elements or more.
void fill_normal_blocks(TorchState& state, const Target& target, const Arguments& arguments);

// normal_ of any other global tensor; takes and leaves the generator's cached sample.
void fill_normal_pairs(TorchState& state, const Target& target, const Arguments& arguments);

}  // namespace dist_rng
