#include "kernel.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

// Each loop is compiled for several instruction sets; which one runs is decided when it is loaded.
// They round alike, so bits do not depend on it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FSDP_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FSDP_CLONES
#endif

namespace fsdp {
namespace {

constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;
constexpr float kTiny = std::numeric_limits<float>::min();

struct Largest {
  float first, second;
};

// Of a parameter p, its gradient g and its moments m and v; the new p. The moments change in place.
inline float advanced(float p, float g, float& m, float& v, const Coefficients& c) {
  if (c.coupled != 0) g = g + p * c.coupled;
  m = m * c.beta1 + g * c.rest1;
  v = v * c.beta2 + (g * g) * c.rest2;
  return p * c.decay - (m * c.size) / (std::sqrt(v) * c.root + c.eps);
}

// The new moments go to `m_out` and `v_out`; their largest magnitudes, as bits: a NaN is more than
// infinity.
FSDP_CLONES Largest advance_codes(float* __restrict param, const float* __restrict grad,
                                  const std::uint8_t* __restrict m_codes,
                                  const float* __restrict m_values, float m_scale,
                                  const std::uint8_t* __restrict v_codes,
                                  const float* __restrict v_values, float v_scale,
                                  float* __restrict m_out, float* __restrict v_out,
                                  std::int64_t count, const Coefficients& coefficients) {
  const Coefficients c = coefficients;
  std::uint32_t largest_m = 0, largest_v = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    float m = m_values[m_codes[i]] * m_scale;
    float v = v_values[v_codes[i]] * v_scale;
    param[i] = advanced(param[i], grad[i], m, v, c);
    m_out[i] = m;
    v_out[i] = v;
    largest_m = std::max(largest_m, std::bit_cast<std::uint32_t>(m) & kMagnitude);
    largest_v = std::max(largest_v, std::bit_cast<std::uint32_t>(v) & kMagnitude);
  }
  return {std::bit_cast<float>(largest_m), std::bit_cast<float>(largest_v)};
}

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

FSDP_CLONES void encode_signed(const float* __restrict values, float inverse,
                               const std::uint32_t* __restrict lookup,
                               std::uint8_t* __restrict codes, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::int32_t>(values[i] * inverse);
    const auto key = static_cast<std::uint32_t>(bits ^ (bits >> 31));
    codes[i] = static_cast<std::uint8_t>((lookup[key >> 16] + (key & 0xFFFF)) >> 16);
  }
}

FSDP_CLONES void encode_unsigned(const float* __restrict values, float inverse,
                                 const std::uint32_t* __restrict lookup,
                                 std::uint8_t* __restrict codes, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto key = std::bit_cast<std::uint32_t>(values[i] * inverse);
    codes[i] = static_cast<std::uint8_t>((lookup[key >> 16] + (key & 0xFFFF)) >> 16);
  }
}

// Of the block behind: it arrives while this one is encoded, which reads nothing new.
void prefetch(const float* param, const float* grad, std::int64_t count) {
#if defined(__GNUC__)
  constexpr std::int64_t kLine = 16, kMost = 1024;  // elements
  for (std::int64_t i = 0; i < std::min(count, kMost); i += kLine) {
    __builtin_prefetch(param + count + i, 1);
    __builtin_prefetch(grad + count + i);
  }
#endif
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
  if (book.zero() == 0) {
    encode_unsigned(moment.room, 1.0f / largest, book.lookup(), moment.codes, count);
  } else {
    encode_signed(moment.room, 1.0f / largest, book.lookup(), moment.codes, count);
  }
  return true;
}

}  // namespace

void step_whole(float* param, const float* grad, float* first, float* second, std::int64_t count,
                const Coefficients& c) {
  advance_floats(param, grad, first, second, count, c);
}

bool step_block(float* param, const float* grad, const Quantized& first, const Quantized& second,
                std::int64_t count, const Coefficients& c) {
  const Largest largest = advance_codes(
      param, grad, first.codes, first.book->values(), *first.scale, second.codes,
      second.book->values(), *second.scale, first.room, second.room, count, c);
  prefetch(param, grad, count);
  const bool finite = encode(first, largest.first, count);
  return encode(second, largest.second, count) && finite;
}

}  // namespace fsdp
