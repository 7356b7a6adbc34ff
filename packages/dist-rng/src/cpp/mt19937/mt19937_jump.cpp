#include "mt19937_jump.h"

#include <algorithm>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../kernels/kernel_set.h"
#include "mt19937.h"

namespace dist_rng {
namespace {

// Polynomials over GF(2) modulo MT19937's characteristic polynomial phi.

constexpr int kDegree = 19937;  // of phi

// Bit i of the words is the coefficient of t^i; degree below kDegree.
using Polynomial = std::vector<std::uint64_t>;

constexpr std::size_t kPolynomialWords = (kDegree + 63) / 64;

void flip(Polynomial& polynomial, int exponent) {
  polynomial[static_cast<std::size_t>(exponent / 64)] ^= std::uint64_t{1} << (exponent % 64);
}

bool has(const Polynomial& polynomial, int exponent) {
  return polynomial[static_cast<std::size_t>(exponent / 64)] >> (exponent % 64) & 1;
}

// p(t) * (t^high + t^low), for a product of degree kDegree at most.
Polynomial times_two_terms(const Polynomial& p, int high, int low) {
  Polynomial product(kPolynomialWords + 1);
  for (int i = 0; i <= kDegree; ++i) {
    if (!has(p, i)) continue;
    flip(product, i + high);
    flip(product, i + low);
  }
  return product;
}

// The exponents of the characteristic polynomial except its leading one. In the notation of the
// source named in mt19937_jump.h, with n = 624, m = 397, r = 31:
//   phi = P Q^31 + a(0) P Q^30 + .. + a(30) P + a(31),  P = t^n + t^m,  Q = t^(n-1) + t^(m-1),
// where a(i) is bit i of the matrix constant.
std::vector<int> lower_exponents() {
  constexpr std::uint32_t kMatrix = 0x9908b0df;
  Polynomial phi(kPolynomialWords + 1), power(kPolynomialWords + 1);
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

// Adds 64 coefficients to those of t^exponent and above.
void add_at(std::uint64_t* words, int exponent, std::uint64_t coefficients) {
  const int word = exponent / 64, bit = exponent % 64;
  words[word] ^= coefficients << bit;
  if (bit != 0) words[word + 1] ^= coefficients >> (64 - bit);
}

// Reduces a polynomial of degree below 2 * kDegree modulo phi, 64 coefficients at a time: phi's
// second exponent is more than 64 below its first: no step adds to the terms that it removes.
void reduce(std::vector<std::uint64_t>& wide) {
  static const std::vector<int> exponents = lower_exponents();
  for (int top = 2 * kDegree; top > kDegree; top -= 64) {
    const int low = top - 64 > kDegree ? top - 64 : kDegree;
    const int word = low / 64, bit = low % 64;
    std::uint64_t excess = wide[static_cast<std::size_t>(word)] >> bit;
    if (bit != 0) excess |= wide[static_cast<std::size_t>(word) + 1] << (64 - bit);
    if (top - low < 64) excess &= (std::uint64_t{1} << (top - low)) - 1;
    if (excess == 0) continue;
    add_at(wide.data(), low, excess);  // the leading term clears them
    for (const int exponent : exponents) add_at(wide.data(), low - kDegree + exponent, excess);
  }
}

// The low 32 bits of x at the even bit positions: squaring over GF(2) leaves no cross terms.
std::uint64_t spread(std::uint64_t x) {
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  x = (x | x << 2) & 0x3333333333333333;
  return (x | x << 1) & 0x5555555555555555;
}

// t^exponent modulo phi.
Polynomial power_of_t(std::uint64_t exponent) {
  Polynomial power(kPolynomialWords);
  flip(power, 0);
  std::vector<std::uint64_t> wide(2 * kPolynomialWords + 2);
  for (int bit = 63; bit >= 0; --bit) {
    const bool odd = exponent >> bit & 1;
    if (!odd && exponent >> bit == 0) continue;
    // power = power^2 * t^odd; the product's degree is below 2 * kDegree.
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < 2 * kPolynomialWords; ++i) {
      const std::uint64_t square = spread(power[i / 2] >> (i % 2 * 32) & 0xffffffff);
      wide[i] = odd ? square << 1 | carry : square;
      carry = square >> 63;
    }
    wide[2 * kPolynomialWords] = wide[2 * kPolynomialWords + 1] = 0;
    reduce(wide);
    power.assign(wide.begin(), wide.begin() + kPolynomialWords);
  }
  return power;
}

// Jumps.

constexpr int kBlock = TorchState::kWords;
constexpr std::size_t kCached = 64;  // distances; 20 KB each

// A twist takes 50 ns with 512-bit vectors and 70 ns with 256. A jump takes 0.2 ms, and its
// exponents 1 to 2 ms more.
constexpr std::int64_t kPaysOnce = 32'000, kPaysRepeated = 4'000;  // blocks

// The exponents i with c(i) = 1 of t^(kBlock * blocks), which determine a jump.
using Exponents = std::vector<std::uint16_t>;

Exponents exponents_of(std::int64_t blocks) {
  const Polynomial power = power_of_t(static_cast<std::uint64_t>(blocks) * kBlock);
  Exponents exponents;
  for (int i = 0; i < kDegree; ++i) {
    if (power[static_cast<std::size_t>(i / 64)] >> (i % 64) & 1) {
      exponents.push_back(static_cast<std::uint16_t>(i));
    }
  }
  return exponents;
}

// An LRU cache of jumps by distance: a training step skips the same few distances every time.
class JumpCache {
 public:
  // Whether the distance was asked for before; records it.
  bool seen_before(std::int64_t blocks) {
    const std::lock_guard lock(mutex_);
    return !move_to_front(blocks);
  }

  std::shared_ptr<const Exponents> find_or_make(std::int64_t blocks) {
    {
      const std::lock_guard lock(mutex_);
      move_to_front(blocks);
      if (const auto& exponents = distances_.front().exponents) return exponents;
    }
    auto made = std::make_shared<const Exponents>(exponents_of(blocks));
    const std::lock_guard lock(mutex_);
    move_to_front(blocks);
    return distances_.front().exponents = std::move(made);
  }

 private:
  struct Distance {
    std::int64_t blocks;
    std::shared_ptr<const Exponents> exponents;  // null until a jump needs them
  };

  // Moves the distance to the front; true if it was not in the cache.
  bool move_to_front(std::int64_t blocks) {
    const auto found = std::find_if(distances_.begin(), distances_.end(),
                                    [&](const Distance& each) { return each.blocks == blocks; });
    if (found != distances_.end()) {
      distances_.splice(distances_.begin(), distances_, found);
      return false;
    }
    distances_.push_front({blocks, nullptr});
    if (distances_.size() > kCached) distances_.pop_back();
    return true;
  }

  std::mutex mutex_;
  std::list<Distance> distances_;
};

JumpCache& jump_cache() {
  static JumpCache instance;
  return instance;
}

}  // namespace

bool jump_pays(std::int64_t blocks) {
  return blocks >= kPaysOnce || (blocks >= kPaysRepeated && jump_cache().seen_before(blocks));
}

void jump_blocks(std::uint32_t* block, std::int64_t blocks) {
  const std::shared_ptr<const Exponents> exponents = jump_cache().find_or_make(blocks);
  // All words x(k + i) of the sum: i + 623 is below kDegree + 623, so 33 blocks are enough.
  constexpr int kBlocks = (kDegree + kBlock - 1) / kBlock + 1;
  std::vector<std::uint32_t> words(static_cast<std::size_t>(kBlocks) * kBlock);
  const KernelSet& kernels = kernel_set();
  std::copy_n(block, kBlock, words.begin());
  for (int b = 1; b < kBlocks; ++b) {
    std::uint32_t* next = words.data() + static_cast<std::ptrdiff_t>(b) * kBlock;
    std::copy_n(next - kBlock, kBlock, next);
    kernels.twist(next);
  }
  kernels.xor_windows(words.data(), exponents->data(), static_cast<int>(exponents->size()), block);
}

}  // namespace dist_rng
