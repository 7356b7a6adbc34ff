// Division by a number that a whole launch shares, as a multiplication.
//
// Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DIST_RNG_DIVIDER __host__ __device__
#else
#define DIST_RNG_DIVIDER
#endif

namespace dist_rng {

struct Divider {
  std::uint64_t magic;
  std::int32_t shift;

  Divider() = default;

  // From 1 to 2^63.
  explicit Divider(std::int64_t divisor) : shift(0) {
    const auto d = static_cast<std::uint64_t>(divisor);
    while ((std::uint64_t{1} << shift) < d) ++shift;
    const unsigned __int128 rest = (static_cast<unsigned __int128>(1) << shift) - d;
    magic = static_cast<std::uint64_t>((rest << 64) / d + 1);
  }

  // Of a number that is not negative.
  DIST_RNG_DIVIDER std::int64_t operator()(std::int64_t number) const {
    const auto n = static_cast<std::uint64_t>(number);
#if defined(__CUDA_ARCH__)
    const std::uint64_t high = __umul64hi(magic, n);
#else
    const auto product = static_cast<unsigned __int128>(magic) * n;
    const auto high = static_cast<std::uint64_t>(product >> 64);
#endif
    return static_cast<std::int64_t>((high + n) >> shift);
  }
};

}  // namespace dist_rng
