// What kernel_set.cpp collects from the other files of this folder.
#pragma once

#include "kernel_set.h"

namespace dist_rng::DIST_RNG_ISA {

void twist(std::uint32_t* block);
void temper(const std::uint32_t* block, std::uint32_t* words, int count);
void xor_windows(const std::uint32_t* words, const std::uint16_t* exponents, int count,
                 std::uint32_t* block);

Kernel uniform(Dtype dtype, const Arguments& arguments);
Kernel normal_blocks(Dtype dtype, const Arguments& arguments);
Convert normal_blocks_low_precision(Dtype dtype);  // of torch 2.11's bf16 and f16
Kernel normal_pairs(Dtype dtype, const Arguments& arguments);
Kernel bernoulli(Dtype dtype, const Arguments& arguments);
Kernel bernoulli_tensor(Dtype dtype, Dtype probabilities);
Kernel exponential(Dtype dtype, const Arguments& arguments);
Kernel integers(Dtype dtype, const Arguments& arguments);
Kernel all_integers(Dtype dtype, const Arguments& arguments);

}  // namespace dist_rng::DIST_RNG_ISA
