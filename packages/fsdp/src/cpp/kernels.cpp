// The portable kernels, and the choice of kernels at run time.
#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <bit>

namespace fsdp {
namespace {

constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;

Largest update(float* __restrict param, const float* __restrict grad, const CodedMoment& first,
               const CodedMoment& second, std::int64_t count, const Coefficients& coefficients) {
  const Coefficients c = coefficients;
  std::uint32_t largest_m = 0, largest_v = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    float m = first.values[first.codes[i]] * first.scale;
    float v = second.values[second.codes[i]] * second.scale;
    param[i] = adam_element(param[i], grad[i], m, v, c);
    first.out[i] = m;
    second.out[i] = v;
    largest_m = std::max(largest_m, std::bit_cast<std::uint32_t>(m) & kMagnitude);
    largest_v = std::max(largest_v, std::bit_cast<std::uint32_t>(v) & kMagnitude);
  }
  return {std::bit_cast<float>(largest_m), std::bit_cast<float>(largest_v)};
}

void encode(const float* __restrict values, float inverse, const std::uint32_t* __restrict lookup,
            std::uint8_t* __restrict codes, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::int32_t>(values[i] * inverse);
    const auto key = static_cast<std::uint32_t>(bits ^ (bits >> 31));
    codes[i] = static_cast<std::uint8_t>((lookup[key >> 16] + (key & 0xFFFF)) >> 16);
  }
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> selected = available_kernels().front();
  return selected;
}

}  // namespace

const Kernels kPortable{"portable", update, encode};

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> available;
#if defined(FSDP_AVX2)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) available.push_back(&kAvx2);
#endif
  available.push_back(&kPortable);
  return available;
}

const Kernels& active_kernels() { return *active().load(std::memory_order_relaxed); }

bool select_kernels(std::string_view name) {
  for (const Kernels* each : available_kernels()) {
    if (each->name != name) continue;
    active().store(each, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace fsdp
