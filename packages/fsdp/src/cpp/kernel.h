// A block, or a run whose moments are fp32: what update.py says, operation for operation.
#pragma once

#include <cstdint>

#include "book.h"
#include "loops.h"

namespace fsdp {

// Elements whose moments are fp32.
void step_whole(float* param, const float* grad, float* first, float* second, std::int64_t count,
                const Coefficients& c);

// One of two moments of a block.
struct Quantized {
  std::uint8_t* codes;
  float* scale;
  float* room;  // for the block's elements
  const Book* book;
};

// A block. False if a moment of it is not finite.
bool step_block(float* param, const float* grad, const Quantized& first, const Quantized& second,
                std::int64_t count, const Coefficients& c);

}  // namespace fsdp
