// The inner loops, compiled once per instruction set and chosen once per process.
//
// Everything under kernels/ lies in the namespace DIST_RNG_ISA and uses no standard container:
// an inline function shared with code for older processors could otherwise be linked in its
// AVX-512 form.  Which bits come out does not depend on the instruction set: where torch's own
// build contracts a * b + c, Arguments says so.
#pragma once

#include <cstdint>
#include <string_view>

#include "../dtype.h"

namespace dist_rng {

// Releases of torch between which the bits of uniform_ and normal_ changed.
enum class Release : int {
  kTorch211,  // bf16 and f16 are drawn in their own precision; uniform_ may return `high`
  kTorch212,  // from here in float; normal_ of bf16 and f16 calls the C library everywhere
  kTorch213,  // and to 2.15: normal_ has one form for all dtypes, with an fma in every build
};

// What one draw needs besides the random words; a kernel reads what its op has.
struct Arguments {
  double low = 0;            // uniform
  double high = 0;           // uniform
  double mean = 0;           // normal
  double std = 0;            // normal
  double p = 0;              // bernoulli with one probability
  double rate = 0;           // exponential
  std::uint64_t range = 0;   // integers
  std::int64_t base = 0;     // integers
  bool fused = false;        // torch's build computes a * b + c with one rounding
  Release release = Release::kTorch213;
};

// Turns words into `count` elements, a multiple of the kernel's granularity.  `input` holds the
// probabilities of bernoulli(tensor), null elsewhere.  False if one of them is out of range.
using Convert = bool (*)(const Arguments& arguments, const std::uint32_t* words, const void* input,
                         void* out, std::int64_t count);

struct Kernel {
  Convert convert = nullptr;  // null: torch does not have this op for this dtype
  int words = 1;              // per element
  int granularity = 1;        // elements that are made together
};

struct KernelSet {
  const char* name;
  void (*twist)(std::uint32_t* block);
  void (*temper)(const std::uint32_t* block, std::uint32_t* words, int count);
  // block[j] = xor over e of words[exponents[e] + j], j < 624.
  void (*xor_windows)(const std::uint32_t* words, const std::uint16_t* exponents, int count,
                      std::uint32_t* block);
  Kernel (*uniform)(Dtype dtype, const Arguments& arguments);
  Kernel (*normal_blocks)(Dtype dtype, const Arguments& arguments);
  Kernel (*normal_pairs)(Dtype dtype, const Arguments& arguments);
  Kernel (*bernoulli)(Dtype dtype, const Arguments& arguments);
  Kernel (*bernoulli_tensor)(Dtype dtype, Dtype probabilities);
  Kernel (*exponential)(Dtype dtype, const Arguments& arguments);
  Kernel (*integers)(Dtype dtype, const Arguments& arguments);
  Kernel (*all_integers)(Dtype dtype, const Arguments& arguments);
};

// The set in use: the best that this processor runs, unless another was asked for.
const KernelSet& kernel_set();

// Asks for another set, by name; null if this processor lacks it. Tests compare the sets.
const KernelSet* use_kernel_set(std::string_view name);

namespace baseline {
extern const KernelSet kKernels;
}
namespace avx2 {
extern const KernelSet kKernels;
}
namespace avx512 {
extern const KernelSet kKernels;
}

}  // namespace dist_rng
