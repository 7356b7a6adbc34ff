// Philox4x32, for hosts and devices; the Python reference is philox/reference.py.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11; cuRAND's
// curandStatePhilox4_32_10_t lays out counter and key as philox_call() does.
//
// All of it is in the namespace DIST_RNG_ISA, for the reason given in kernels/kernel_set.h; for
// nvcc that namespace is `device`.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DIST_RNG_INLINE __device__ __forceinline__
#else
#define DIST_RNG_INLINE inline
#endif

namespace dist_rng::DIST_RNG_ISA {

struct Words {
  std::uint32_t x, y, z, w;
};

// Word 0 to 3; costs nothing where the compiler knows the number.
DIST_RNG_INLINE std::uint32_t pick(const Words& words, int number) {
  const std::uint32_t low = number & 1 ? words.y : words.x;
  const std::uint32_t high = number & 1 ? words.w : words.z;
  return number & 2 ? high : low;
}

DIST_RNG_INLINE Words philox_round(Words counter, std::uint32_t key_0, std::uint32_t key_1) {
  const std::uint64_t first = std::uint64_t{0xD2511F53} * counter.x;
  const std::uint64_t second = std::uint64_t{0xCD9E8D57} * counter.z;
  return {static_cast<std::uint32_t>(second >> 32) ^ counter.y ^ key_0,
          static_cast<std::uint32_t>(second),
          static_cast<std::uint32_t>(first >> 32) ^ counter.w ^ key_1,
          static_cast<std::uint32_t>(first)};
}

template <int kRounds = 10>
DIST_RNG_INLINE Words philox4x32(Words counter, std::uint32_t key_0, std::uint32_t key_1) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
    counter = philox_round(counter, key_0, key_1);
    key_0 += 0x9E3779B9;
    key_1 += 0xBB67AE85;
  }
  return counter;
}

// The words of one call: `count` is the generator's offset / 4 plus the number of the call.
DIST_RNG_INLINE Words philox_call(std::uint64_t seed, std::uint64_t count, std::uint64_t thread) {
  const Words counter{static_cast<std::uint32_t>(count), static_cast<std::uint32_t>(count >> 32),
                      static_cast<std::uint32_t>(thread), static_cast<std::uint32_t>(thread >> 32)};
  return philox4x32(counter, static_cast<std::uint32_t>(seed),
                    static_cast<std::uint32_t>(seed >> 32));
}

}  // namespace dist_rng::DIST_RNG_ISA
