#include "normal_pair.h"

#include <cmath>

namespace dist_rng {

NormalPair normal_pair(double u1, double u2) {
  constexpr double kPi = 3.14159265358979323846;
  const double radius = ::sqrt(-2.0 * ::log1p(-u2));
  const double theta = 2.0 * kPi * u1;
  return {radius * ::cos(theta), radius * ::sin(theta)};
}

}  // namespace dist_rng
