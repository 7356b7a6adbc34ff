// Two standard normals from two uniforms, as normal_'s serial path makes them.
#pragma once

namespace dist_rng {

struct NormalPair {
  double first;
  double second;  // what the generator keeps if only one is asked for
};

// Box-Muller in double.  Source: ATen/core/DistributionsHelper.h, normal_distribution.
NormalPair normal_pair(double u1, double u2);

}  // namespace dist_rng
