// A step of many parameters, on several threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel.h"

namespace fsdp {

// One parameter's elements on this rank. Without scales its moments are fp32, else codes.
struct Job {
  float* param;
  const float* grad;
  void* first;
  float* first_scales;
  void* second;
  float* second_scales;
  std::int64_t count;
};

// The jobs, by index, that have a block which is not finite.
std::vector<std::size_t> step(const std::vector<Job>& jobs, const Coefficients& c,
                              std::int64_t block_size, const Book& first, const Book& second,
                              int threads);

}  // namespace fsdp
