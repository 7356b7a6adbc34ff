// Kernels for AVX2, eight elements at a time: tables are read by gather instructions, which
// compilers do not generate from the portable kernels. Those process the last elements. The target
// is without `fma`, so that no multiply-add changes the rounding.
#include "kernels.h"

#if defined(FSDP_AVX2)

#include <immintrin.h>

#include <algorithm>
#include <bit>

#define FSDP_TARGET __attribute__((target("avx2")))

namespace fsdp {
namespace {

constexpr std::int64_t kLanes = 8, kLine = 16;  // elements: of a vector, and of a cache line

// How far ahead memory is prefetched, in elements: blocks are too short for the hardware
// prefetcher. Prefetching an address past the end is allowed.
constexpr std::int64_t kAhead = 512;

FSDP_TARGET inline void prefetch(const float* param, const float* grad, const CodedMoment& first,
                                 const CodedMoment& second, std::int64_t at) {
  _mm_prefetch(reinterpret_cast<const char*>(param + at), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(grad + at), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(first.codes + at), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(second.codes + at), _MM_HINT_T0);
}

FSDP_TARGET inline __m256 decoded(const CodedMoment& coded, std::int64_t at) {
  const auto* codes = reinterpret_cast<const __m128i*>(coded.codes + at);
  const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes));
  const __m256 values = _mm256_i32gather_ps(coded.values, index, sizeof(float));
  return _mm256_mul_ps(values, _mm256_set1_ps(coded.scale));
}

// Returns a * b + c * d, rounding each product.
FSDP_TARGET inline __m256 weighted_sum(__m256 a, float b, __m256 c, float d) {
  return _mm256_add_ps(_mm256_mul_ps(a, _mm256_set1_ps(b)), _mm256_mul_ps(c, _mm256_set1_ps(d)));
}

// Returns the bits of the larger magnitude.
FSDP_TARGET inline __m256i larger(__m256i largest, __m256 values) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  return _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(values), magnitude));
}

FSDP_TARGET inline std::uint32_t largest_of(__m256i largest) {
  alignas(32) std::uint32_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
  return *std::max_element(lanes, lanes + kLanes);
}

// The largest magnitudes so far, as bits.
struct LargestBits {
  __m256i first, second;
};

FSDP_TARGET inline void update_lanes(float* __restrict param, const float* __restrict grad,
                                     const CodedMoment& first, const CodedMoment& second,
                                     std::int64_t at, const Coefficients& c,
                                     LargestBits& largest) {
  const __m256 p = _mm256_loadu_ps(param + at);
  __m256 g = _mm256_loadu_ps(grad + at);
  if (c.l2_factor != 0) g = _mm256_add_ps(g, _mm256_mul_ps(p, _mm256_set1_ps(c.l2_factor)));
  const __m256 m = weighted_sum(decoded(first, at), c.beta1, g, c.one_minus_beta1);
  const __m256 v =
      weighted_sum(decoded(second, at), c.beta2, _mm256_mul_ps(g, g), c.one_minus_beta2);
  const __m256 root =
      _mm256_mul_ps(_mm256_sqrt_ps(v), _mm256_set1_ps(c.inv_bias_correction2_sqrt));
  const __m256 step = _mm256_div_ps(_mm256_mul_ps(m, _mm256_set1_ps(c.step_size)),
                                    _mm256_add_ps(root, _mm256_set1_ps(c.eps)));
  _mm256_storeu_ps(param + at,
                   _mm256_sub_ps(_mm256_mul_ps(p, _mm256_set1_ps(c.param_decay)), step));
  _mm256_storeu_ps(first.out + at, m);
  _mm256_storeu_ps(second.out + at, v);
  largest = {larger(largest.first, m), larger(largest.second, v)};
}

FSDP_TARGET Largest update(float* __restrict param, const float* __restrict grad,
                           const CodedMoment& first, const CodedMoment& second,
                           std::int64_t count, const Coefficients& coefficients) {
  const Coefficients c = coefficients;
  const CodedMoment one = first, two = second;
  LargestBits largest{_mm256_setzero_si256(), _mm256_setzero_si256()};
  std::int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    prefetch(param, grad, one, two, i + kAhead);
    update_lanes(param, grad, one, two, i, c, largest);
    update_lanes(param, grad, one, two, i + kLanes, c, largest);
  }
  const CodedMoment rest_m{one.codes + i, one.values, one.scale, one.out + i};
  const CodedMoment rest_v{two.codes + i, two.values, two.scale, two.out + i};
  const Largest rest = kPortable.update(param + i, grad + i, rest_m, rest_v, count - i, c);
  const auto bits_m = std::bit_cast<std::uint32_t>(rest.first);
  const auto bits_v = std::bit_cast<std::uint32_t>(rest.second);
  return {std::bit_cast<float>(std::max(bits_m, largest_of(largest.first))),
          std::bit_cast<float>(std::max(bits_v, largest_of(largest.second)))};
}

FSDP_TARGET void encode(const float* __restrict values, float inverse,
                        const std::uint32_t* __restrict lookup, std::uint8_t* __restrict codes,
                        std::int64_t count) {
  const auto* table = reinterpret_cast<const int*>(lookup);
  const __m256i lower = _mm256_set1_epi32(0xFFFF);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m256 units = _mm256_mul_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(inverse));
    const __m256i bits = _mm256_castps_si256(units);
    const __m256i key = _mm256_xor_si256(bits, _mm256_srai_epi32(bits, 31));
    const __m256i entry = _mm256_i32gather_epi32(table, _mm256_srli_epi32(key, 16), sizeof(int));
    const __m256i sum = _mm256_add_epi32(entry, _mm256_and_si256(key, lower));
    const __m256i code = _mm256_srli_epi32(sum, 16);
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_packus_epi16(words, words));
  }
  kPortable.encode(values + i, inverse, lookup, codes + i, count - i);
}

}  // namespace

const Kernels kAvx2{"avx2", update, encode};

}  // namespace fsdp

#endif
