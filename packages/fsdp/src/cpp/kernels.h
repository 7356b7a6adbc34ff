// The kernels over the elements of a block, one set per instruction set. All sets round alike, one
// operation at a time, so the choice of a set changes no bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

namespace fsdp {

// The numbers of one step; see AdamCoefficients in adam8bit/update.py.
struct Coefficients {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_bias_correction2_sqrt, eps,
      param_decay, l2_factor;
};

// Adam for one element: updates moments m and v of parameter p with gradient g, returns the new p.
inline float adam_element(float p, float g, float& m, float& v, const Coefficients& c) {
  if (c.l2_factor != 0) g = g + p * c.l2_factor;
  m = m * c.beta1 + g * c.one_minus_beta1;
  v = v * c.beta2 + (g * g) * c.one_minus_beta2;
  return p * c.param_decay -
         (m * c.step_size) / (std::sqrt(v) * c.inv_bias_correction2_sqrt + c.eps);
}

// The largest magnitudes of both moments; NaN counts as the largest, then infinity.
struct Largest {
  float first, second;
};

// A moment of a block: its codes, the 256 values that codes represent, its scale, and the memory
// for the new moment.
struct CodedMoment {
  const std::uint8_t* codes;
  const float* values;
  float scale;
  float* out;
};

struct Kernels {
  std::string_view name;

  // Updates the parameters of a block and computes its new moments.
  Largest (*update)(float* param, const float* grad, const CodedMoment& first,
                    const CodedMoment& second, std::int64_t count, const Coefficients& c);

  // Computes the codes of values times `inverse`, with magnitudes up to 1, by a
  // CodeBookTable::lookup().
  void (*encode)(const float* values, float inverse, const std::uint32_t* lookup,
                 std::uint8_t* codes, std::int64_t count);
};

extern const Kernels kPortable;
#if defined(__x86_64__) && defined(__GNUC__)
#define FSDP_AVX2
extern const Kernels kAvx2;
#endif

// The kernels that this machine supports, the fastest first.
std::vector<const Kernels*> available_kernels();

// The kernels in use: the fastest, unless others were selected.
const Kernels& active_kernels();

// Selects kernels; returns false if this machine does not support kernels of this name.
bool select_kernels(std::string_view name);

}  // namespace fsdp
