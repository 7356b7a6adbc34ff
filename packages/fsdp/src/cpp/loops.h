// The loops over elements of blocks, once for each instruction set that has its own. All round alike,
// one operation at a time, so which of them run changes no bit.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace fsdp {

struct Coefficients {
  float beta1, rest1, beta2, rest2, size, root, eps, decay, coupled;
};

// Largest magnitudes of both moments; of magnitudes NaN is the largest, then infinity.
struct Largest {
  float first, second;
};

// Codes of a moment, the 256 values that they stand for, the scale, and where the moment goes.
struct Coded {
  const std::uint8_t* codes;
  const float* values;
  float scale;
  float* out;
};

struct Loops {
  std::string_view name;

  // Advances parameters and moments of which there are codes.
  Largest (*advance)(float* param, const float* grad, const Coded& first, const Coded& second,
                     std::int64_t count, const Coefficients& c);

  // The codes of values times `inverse`, whose magnitudes are 1 at most, by a Book's lookup().
  void (*encode)(const float* values, float inverse, const std::uint32_t* lookup,
                 std::uint8_t* codes, std::int64_t count);
};

extern const Loops kPortable;
#if defined(__x86_64__) && defined(__GNUC__)
#define FSDP_AVX2
extern const Loops kAvx2;
#endif

// Those that this machine can run, the fastest first.
std::vector<const Loops*> all_loops();

// Those in use: the fastest, until others are chosen.
const Loops& loops();

// False if this machine has none of that name.
bool use_loops(std::string_view name);

}  // namespace fsdp
