// Fills a local CPU tensor with its part of the draws of one device: one function per way in which
// elements take words from the mt19937 stream.
//
// Each advances `state` by the draws of the global tensor, whatever the local tensor holds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../dtype.h"
#include "../kernels/kernel_set.h"
#include "../local_grid.h"
#include "../mt19937/mt19937.h"

namespace dist_rng {

struct FillTarget {
  void* data;  // the local tensor's first element; its strides are in the grid
  Dtype dtype;
  const LocalGrid& grid;
  std::int64_t global_numel;
};

// Ops where element i takes the words from i * kernel.words: all but normal_ and log_normal_.
// `input` has the target's strides, and is null where the op has none. False if an input is out of
// range.
bool fill_elements(TorchState& state, const FillTarget& target, const Kernel& kernel,
                   const Arguments& arguments, const void* input, std::size_t input_size);

// normal_ of a contiguous global tensor of 16 elements or more.
void fill_normal_blocks(TorchState& state, const FillTarget& target, const Arguments& arguments);

// normal_ of any other global tensor, and log_normal_; uses and stores the generator's cached
// sample.
void fill_normal_pairs(TorchState& state, const FillTarget& target, const Kernel& kernel,
                       const Arguments& arguments);

}  // namespace dist_rng
