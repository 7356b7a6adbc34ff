// Fills a local CPU tensor with its part of what a CUDA device would have drawn.
#pragma once

#include <cstdint>
#include <vector>

#include "../dtype.h"
#include "../local_grid.h"
#include "launch.h"

namespace dist_rng {

struct PhiloxTarget {
  void* data;
  Dtype dtype;
  const LocalGrid& grid;
};

struct PhiloxStream {
  std::uint64_t seed;
  AccessPattern access;
  std::vector<PhiloxLaunch> launches;  // ascending, of the global tensor
};

// False if there is no kernel for this dtype. `probabilities` have the target's strides, and are
// fp64 for an fp64 target and fp32 for any other; null where the draw has none.
bool fill_philox(const PhiloxTarget& target, const PhiloxStream& stream, PhiloxKind kind,
                 const PhiloxArguments& arguments, const void* probabilities);

}  // namespace dist_rng
