// Adam for one element.
#pragma once

#include <cmath>

#include "loops.h"

namespace fsdp {

// Of a parameter p, its gradient g and its moments m and v; the new p. The moments change in place.
inline float advanced(float p, float g, float& m, float& v, const Coefficients& c) {
  if (c.coupled != 0) g = g + p * c.coupled;
  m = m * c.beta1 + g * c.rest1;
  v = v * c.beta2 + (g * g) * c.rest2;
  return p * c.decay - (m * c.size) / (std::sqrt(v) * c.root + c.eps);
}

}  // namespace fsdp
