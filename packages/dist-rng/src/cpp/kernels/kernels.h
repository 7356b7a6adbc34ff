// The kernels of this folder, which kernel_table.cpp collects.
#pragma once

#include "kernel_set.h"

namespace dist_rng::DIST_RNG_ISA {

void twist(std::uint32_t* block);
void temper(const std::uint32_t* block, std::uint32_t* words, int count);
void xor_windows(const std::uint32_t* words, const std::uint16_t* exponents, int count,
                 std::uint32_t* block);

Kernel uniform(Dtype dtype, const Arguments& arguments);
Kernel normal_blocks(Dtype dtype, const Arguments& arguments);
Kernel normal_pairs(Dtype dtype, const Arguments& arguments);
Kernel log_normal_pairs(Dtype dtype, const Arguments& arguments);
Kernel bernoulli(Dtype dtype, const Arguments& arguments);
Kernel bernoulli_tensor(Dtype dtype, Dtype probabilities);
Kernel exponential(Dtype dtype, const Arguments& arguments);
Kernel cauchy(Dtype dtype, const Arguments& arguments);
Kernel geometric(Dtype dtype, const Arguments& arguments);
Kernel integers(Dtype dtype, const Arguments& arguments);
Kernel all_integers(Dtype dtype, const Arguments& arguments);
void philox_calls(std::uint64_t seed, std::uint64_t call, std::uint64_t thread, std::int64_t count,
                  std::uint32_t* const* words);
PhiloxConvert philox_convert(PhiloxKind kind, Dtype dtype);

}  // namespace dist_rng::DIST_RNG_ISA
