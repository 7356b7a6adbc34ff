// Fills a local tensor with its part of what a CUDA device would have drawn.
#pragma once

#include <cstdint>
#include <vector>

#include "dtype.h"
#include "philox_draw.h"
#include "philox_map.h"
#include "walk.h"

namespace dist_rng {

struct PhiloxTarget {
  void* data;
  Dtype dtype;
  const Grid& grid;
};

struct PhiloxStream {
  std::uint64_t seed;
  PhiloxReach reach;
  std::vector<PhiloxLaunch> launches;  // ascending, of the global tensor
};

// False if there is no such kernel. `probabilities` have the target's strides, and are fp64 for an
// fp64 target and fp32 for any other; null where the draw has none.
bool fill_philox(const PhiloxTarget& target, const PhiloxStream& stream, PhiloxKind kind,
                 const PhiloxArguments& arguments, const void* probabilities);

}  // namespace dist_rng
