// What one draw needs besides its words: plain data, the same for emulator and CUDA kernels.
//
// Filled in from a Recipe of recipe.py, whose enumerations have these values.
#pragma once

#include <cstdint>

namespace dist_rng {

enum class PhiloxKind : std::int32_t {
  kUniform = 0,
  kNormal = 1,
  kExponential = 2,
  kBernoulli = 3,        // u < a, u in what torch computes in for the element type
  kBernoulliTensor = 4,  // u <= p, u in fp32
  kKeep = 5,             // u < a, u in fp32
  kModulo32 = 6,
  kModulo64 = 7,
};

struct PhiloxArguments {
  double a = 0;  // low, mean, rate or threshold
  double b = 0;  // high or standard deviation
  std::uint64_t modulus = 1;
  std::int64_t base = 0;
};

}  // namespace dist_rng
