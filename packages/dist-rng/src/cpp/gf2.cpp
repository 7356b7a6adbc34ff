#include "gf2.h"

#include <cstddef>

namespace dist_rng {
namespace {

constexpr std::size_t kWords = (kDegree + 63) / 64;

void flip(Polynomial& polynomial, int exponent) {
  polynomial[static_cast<std::size_t>(exponent / 64)] ^= std::uint64_t{1} << (exponent % 64);
}

bool has(const Polynomial& polynomial, int exponent) {
  return polynomial[static_cast<std::size_t>(exponent / 64)] >> (exponent % 64) & 1;
}

// p(t) * (t^high + t^low), for a product of degree kDegree at most.
Polynomial times_two_terms(const Polynomial& p, int high, int low) {
  Polynomial product(kWords + 1);
  for (int i = 0; i <= kDegree; ++i) {
    if (!has(p, i)) continue;
    flip(product, i + high);
    flip(product, i + low);
  }
  return product;
}

// The exponents of the characteristic polynomial, its leading one apart.  In the words of the
// source named in mt19937_jump.h, with n = 624, m = 397, r = 31:
//   phi = P Q^31 + a(0) P Q^30 + .. + a(30) P + a(31),  P = t^n + t^m,  Q = t^(n-1) + t^(m-1),
// where a(i) is bit i of the matrix constant.
std::vector<int> lower_exponents() {
  constexpr std::uint32_t kMatrix = 0x9908b0df;
  Polynomial phi(kWords + 1), power(kWords + 1);
  if (kMatrix >> 31 & 1) flip(phi, 0);
  flip(power, 0);  // Q^0
  for (int q = 0; q <= 31; ++q) {
    if (q == 31 || (kMatrix >> (30 - q) & 1)) {
      const Polynomial term = times_two_terms(power, 624, 397);
      for (std::size_t i = 0; i < phi.size(); ++i) phi[i] ^= term[i];
    }
    if (q < 31) power = times_two_terms(power, 623, 396);
  }
  std::vector<int> exponents;
  for (int i = 0; i < kDegree; ++i) {
    if (has(phi, i)) exponents.push_back(i);
  }
  return exponents;
}

// Xors 64 coefficients onto those of t^exponent and above.
void add_at(std::uint64_t* words, int exponent, std::uint64_t coefficients) {
  const int word = exponent / 64, bit = exponent % 64;
  words[word] ^= coefficients << bit;
  if (bit != 0) words[word + 1] ^= coefficients >> (64 - bit);
}

// Brings a polynomial of degree below 2 * kDegree under kDegree.  64 coefficients at a time,
// which is right because phi's second exponent lies more than 64 below its first.
void reduce(std::vector<std::uint64_t>& wide) {
  static const std::vector<int> exponents = lower_exponents();
  for (int top = 2 * kDegree; top > kDegree; top -= 64) {
    const int low = top - 64 > kDegree ? top - 64 : kDegree;
    const int word = low / 64, bit = low % 64;
    std::uint64_t excess = wide[static_cast<std::size_t>(word)] >> bit;
    if (bit != 0) excess |= wide[static_cast<std::size_t>(word) + 1] << (64 - bit);
    if (top - low < 64) excess &= (std::uint64_t{1} << (top - low)) - 1;
    if (excess == 0) continue;
    add_at(wide.data(), low, excess);  // the leading term clears what it stood for
    for (const int exponent : exponents) add_at(wide.data(), low - kDegree + exponent, excess);
  }
}

// The 32 bits of x at the even places: squaring over GF(2) leaves no cross terms.
std::uint64_t spread(std::uint64_t x) {
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  x = (x | x << 2) & 0x3333333333333333;
  return (x | x << 1) & 0x5555555555555555;
}

}  // namespace

Polynomial power_of_t(std::uint64_t exponent) {
  Polynomial power(kWords);
  flip(power, 0);
  std::vector<std::uint64_t> wide(2 * kWords + 2);
  for (int bit = 63; bit >= 0; --bit) {
    const bool odd = exponent >> bit & 1;
    if (!odd && exponent >> bit == 0) continue;
    // power = power^2 * t^odd; the product's degree is below 2 * kDegree.
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < 2 * kWords; ++i) {
      const std::uint64_t square = spread(power[i / 2] >> (i % 2 * 32) & 0xffffffff);
      wide[i] = odd ? square << 1 | carry : square;
      carry = square >> 63;
    }
    wide[2 * kWords] = wide[2 * kWords + 1] = 0;
    reduce(wide);
    power.assign(wide.begin(), wide.begin() + kWords);
  }
  return power;
}

}  // namespace dist_rng
