// MT19937's twist and tempering, as loops that a compiler vectorises.
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

constexpr int kBlock = 624, kShift = 397;

inline std::uint32_t mix(std::uint32_t above, std::uint32_t below) {
  const std::uint32_t joined = (above & 0x80000000) | (below & 0x7fffffff);
  return joined >> 1 ^ ((0 - (below & 1)) & 0x9908b0df);
}

}  // namespace

void twist(std::uint32_t* block) {
  for (int i = 0; i < kBlock - kShift; ++i) {
    block[i] = block[i + kShift] ^ mix(block[i], block[i + 1]);
  }
  for (int i = kBlock - kShift; i < kBlock - 1; ++i) {
    block[i] = block[i + kShift - kBlock] ^ mix(block[i], block[i + 1]);
  }
  block[kBlock - 1] = block[kShift - 1] ^ mix(block[kBlock - 1], block[0]);
}

void temper(const std::uint32_t* __restrict block, std::uint32_t* __restrict words, int count) {
  for (int i = 0; i < count; ++i) {
    std::uint32_t y = block[i];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680;
    y ^= y << 15 & 0xefc60000;
    y ^= y >> 18;
    words[i] = y;
  }
}

void xor_windows(const std::uint32_t* __restrict words, const std::uint16_t* exponents, int count,
                 std::uint32_t* __restrict block) {
  // A slice of the window stays in registers over all exponents: thirteen of the sixteen that
  // every vector unit has.
  using Vector = std::uint32_t __attribute__((vector_size(32), aligned(4), may_alias));
  constexpr int kLanes = 8, kVectors = 13;
  static_assert(kBlock % (kLanes * kVectors) == 0);
  for (int first = 0; first < kBlock; first += kLanes * kVectors) {
    Vector sum[kVectors] = {};
    for (int e = 0; e < count; ++e) {
      const auto* window = reinterpret_cast<const Vector*>(words + exponents[e] + first);
      for (int v = 0; v < kVectors; ++v) sum[v] ^= window[v];
    }
    for (int v = 0; v < kVectors; ++v) reinterpret_cast<Vector*>(block + first)[v] = sum[v];
  }
}

}  // namespace dist_rng::DIST_RNG_ISA
