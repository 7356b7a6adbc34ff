#include "kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "advance.h"

// Compiled for two instruction sets; which one runs is decided when it is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FSDP_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FSDP_CLONES
#endif

namespace fsdp {
namespace {

constexpr float kTiny = std::numeric_limits<float>::min();

FSDP_CLONES void advance_floats(float* __restrict param, const float* __restrict grad,
                                float* __restrict first, float* __restrict second,
                                std::int64_t count, const Coefficients& coefficients) {
  const Coefficients c = coefficients;
  for (std::int64_t i = 0; i < count; ++i) {
    float m = first[i], v = second[i];
    param[i] = advanced(param[i], grad[i], m, v, c);
    first[i] = m;
    second[i] = v;
  }
}

bool encode(const Quantized& moment, float largest, std::int64_t count) {
  const Book& book = *moment.book;
  const bool finite = std::isfinite(largest);
  if (!finite || largest < kTiny) {
    *moment.scale = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    std::fill(moment.codes, moment.codes + count, static_cast<std::uint8_t>(book.zero()));
    return finite;
  }
  *moment.scale = largest;
  loops().encode(moment.room, 1.0f / largest, book.lookup(), moment.codes, count);
  return true;
}

Coded coded(const Quantized& moment) {
  return {moment.codes, moment.book->values(), *moment.scale, moment.room};
}

}  // namespace

void step_whole(float* param, const float* grad, float* first, float* second, std::int64_t count,
                const Coefficients& c) {
  advance_floats(param, grad, first, second, count, c);
}

bool step_block(float* param, const float* grad, const Quantized& first, const Quantized& second,
                std::int64_t count, const Coefficients& c) {
  const Largest largest =
      loops().advance(param, grad, coded(first), coded(second), count, c);
  const bool finite = encode(first, largest.first, count);
  return encode(second, largest.second, count) && finite;
}

}  // namespace fsdp
