// What a CUDA launch draws and which thread, call and lane draws an element, for hosts and devices.
//
// Plain data, the same for the emulator and the CUDA kernels. The terms are those of the Note in
// philox/launches.py; the enumerations have the values of philox/kernel_spec.py.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DIST_RNG_CONSTEXPR __host__ __device__ constexpr
#else
#define DIST_RNG_CONSTEXPR constexpr
#endif

namespace dist_rng {

enum class PhiloxKind : std::int32_t {
  kUniform = 0,
  kNormal = 1,
  kExponential = 2,
  kBernoulli = 3,        // u < a, u in the type in which torch computes the elements
  kBernoulliTensor = 4,  // u <= p, u in fp32
  kDropoutMask = 5,      // u < a, u in fp32
  kModulo32 = 6,
  kModulo64 = 7,
};

// The arguments of one draw; a formula reads those that it has.
struct PhiloxArguments {
  double a = 0;  // low, mean, rate or threshold
  double b = 0;  // high or standard deviation
  std::uint64_t modulus = 1;
  std::int64_t base = 0;
};

// A kernel, which draws a range of the global tensor's draw indices.
struct PhiloxLaunch {
  std::int64_t start;    // the first draw index
  std::int64_t stop;     // one past the last
  std::int64_t threads;  // of the launch that is reproduced
  std::uint64_t count;   // the generator's offset at this launch / 4
};

// How a kernel's threads access the elements.
struct AccessPattern {
  std::int32_t unroll;  // elements of one call, a stride apart: 4 or 2
  std::int32_t vector;  // 0, or neighbours that a thread takes at a time: 8, 4 or 2

  // Both are powers of two, and devices divide slowly.
  DIST_RNG_CONSTEXPR std::int32_t unroll_shift() const { return unroll / 2; }
  DIST_RNG_CONSTEXPR std::int32_t vector_shift() const { return vector == 8 ? 3 : vector / 2; }

  // Calls that one vector takes, and the elements of each.
  DIST_RNG_CONSTEXPR std::int32_t calls() const { return (vector + 3) / 4; }
  DIST_RNG_CONSTEXPR std::int32_t elements_per_call() const { return vector < 4 ? vector : 4; }
};

// Where an element's random words come from.
struct WordSource {
  std::int64_t thread;
  std::int64_t call;
  std::int32_t lane;
};

// `divide` returns its argument / threads; devices pass one that is faster than the division.
template <typename Divide>
DIST_RNG_CONSTEXPR WordSource word_source_of(const AccessPattern& access, std::int64_t threads,
                                             std::int64_t index, const Divide& divide) {
  if (access.vector != 0) {
    const std::int64_t group = index >> access.vector_shift();
    const std::int64_t turn = divide(group);
    const auto element = static_cast<std::int32_t>(index & (access.vector - 1));
    return {group - turn * threads, turn * access.calls() + element / 4, element % 4};
  }
  const std::int64_t stride = divide(index);
  return {index - stride * threads, stride >> access.unroll_shift(),
          static_cast<std::int32_t>(stride & (access.unroll - 1))};
}

}  // namespace dist_rng
