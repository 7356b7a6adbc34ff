// Polynomials over GF(2) modulo MT19937's characteristic polynomial.
#pragma once

#include <cstdint>
#include <vector>

namespace dist_rng {

constexpr int kDegree = 19937;  // of the characteristic polynomial

// Bit i of the words is the coefficient of t^i; degree below kDegree.
using Polynomial = std::vector<std::uint64_t>;

// t^exponent modulo the characteristic polynomial.
Polynomial power_of_t(std::uint64_t exponent);

}  // namespace dist_rng
