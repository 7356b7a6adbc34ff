// A step of Adam8bit on many parameters, on several threads.
#pragma once

#include <cstdint>
#include <vector>

#include "code_book.h"
#include "kernels.h"

namespace fsdp {

// The elements of one parameter on this rank. The moments are fp32 without scales, else codes.
struct LocalParam {
  float* param;
  const float* grad;
  void* first;
  float* first_scales;
  void* second;
  float* second_scales;
  std::int64_t count;
};

// Updates parameters and moments; returns the indices of the parameters that have a block that is
// not finite.
std::vector<std::size_t> step(const std::vector<LocalParam>& params, const Coefficients& c,
                              std::int64_t block_size, const CodeBookTable& first,
                              const CodeBookTable& second, int threads);

}  // namespace fsdp
