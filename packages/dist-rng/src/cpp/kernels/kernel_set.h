// The inner loops, compiled once per instruction set and chosen once per process.
//
// Everything in this folder except kernel_set.cpp is in the namespace DIST_RNG_ISA, and uses no
// standard container and nothing but the data of philox/launch.h: otherwise an inline function
// shared with code for older processors could be linked in its AVX-512 form. The bits do not depend
// on the instruction set: Arguments::fused tells whether torch's build contracts a * b + c.
#pragma once

#include <cstdint>
#include <string_view>

#include "../dtype.h"
#include "../philox/launch.h"

namespace dist_rng {

// Releases of torch between which the bits of uniform_ and normal_ changed.
enum class TorchRelease : int {
  kTorch211,  // bf16 and f16 are drawn in their own precision; uniform_ may return `high`
  kTorch212,  // bf16 and f16 are drawn in float; their normal_ calls the C library in every build
  kTorch213,  // up to 2.15: normal_ has one form for all dtypes, with an fma in every build
};

// The arguments of one draw; a kernel reads those that its op has.
struct Arguments {
  double low = 0;            // uniform
  double high = 0;           // uniform
  double mean = 0;           // normal, log-normal
  double std = 0;            // normal, log-normal
  double p = 0;              // bernoulli with one probability, geometric
  double rate = 0;           // exponential
  double median = 0;         // cauchy
  double sigma = 0;          // cauchy
  std::uint64_t range = 0;   // integers
  std::int64_t base = 0;     // integers
  bool fused = false;        // torch's build computes a * b + c with one rounding
  TorchRelease release = TorchRelease::kTorch213;
};

// Turns words into `count` elements, a multiple of the kernel's granularity. `input` holds the
// probabilities of bernoulli(tensor), null elsewhere. False if one of them is out of range.
using Convert = bool (*)(const Arguments& arguments, const std::uint32_t* words, const void* input,
                         void* out, std::int64_t count);

struct Kernel {
  Convert convert = nullptr;  // null: torch does not have this op for this dtype
  int words = 1;              // per element
  int granularity = 1;        // elements that are made together
};

// Turns lane `lane` of `count` Philox calls into as many elements. `words[j][i]` is word j of call
// i; `probabilities` are packed, and null except for Bernoulli of a tensor.
using PhiloxConvert = void (*)(const PhiloxArguments& arguments,
                               const std::uint32_t* const* words, int lane,
                               const void* probabilities, void* out, std::int64_t count);

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
  Kernel (*log_normal_pairs)(Dtype dtype, const Arguments& arguments);
  Kernel (*bernoulli)(Dtype dtype, const Arguments& arguments);
  Kernel (*bernoulli_tensor)(Dtype dtype, Dtype probabilities);
  Kernel (*exponential)(Dtype dtype, const Arguments& arguments);
  Kernel (*cauchy)(Dtype dtype, const Arguments& arguments);
  Kernel (*geometric)(Dtype dtype, const Arguments& arguments);
  Kernel (*integers)(Dtype dtype, const Arguments& arguments);
  Kernel (*all_integers)(Dtype dtype, const Arguments& arguments);
  // words[j][i], j < 4, i < count: what thread `thread + i` gets from its call of number `call`.
  void (*philox_calls)(std::uint64_t seed, std::uint64_t call, std::uint64_t thread,
                       std::int64_t count, std::uint32_t* const* words);
  // Null where torch does not have this distribution for this dtype.
  PhiloxConvert (*philox_convert)(PhiloxKind kind, Dtype dtype);
};

struct NormalPair {
  double first;
  double second;  // what the generator caches if only one is asked for
};

// Two standard normals from two uniforms, as normal_'s serial path makes them: Box-Muller in double
// with the C library's functions, compiled once for all sets (cpu/fill_normal.cpp).
// Source: ATen/core/DistributionsHelper.h, normal_distribution.
NormalPair normal_pair(double u1, double u2);

// The set in use: the best one that this processor runs, unless another was selected.
const KernelSet& kernel_set();

// Selects a set by name; null if this processor lacks it. Tests compare the sets.
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
