// Which thread, call and lane draws an element, for hosts and devices; see Note [words of this
// module] in philox.py, whose Launch this is.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DIST_RNG_MAP __host__ __device__ constexpr
#else
#define DIST_RNG_MAP constexpr
#endif

namespace dist_rng {

struct PhiloxLaunch {
  std::int64_t start;    // the first draw index
  std::int64_t stop;     // one past the last
  std::int64_t threads;  // of the launch that is reproduced
  std::uint64_t count;   // the generator's offset at this launch, over 4
};

struct PhiloxReach {
  std::int32_t unroll;  // elements of one call, a stride apart: 4 or 2
  std::int32_t vector;  // 0, or neighbours that a thread takes at a time: 8, 4 or 2

  // Both are powers of two, and devices divide slowly.
  DIST_RNG_MAP std::int32_t unroll_shift() const { return unroll / 2; }
  DIST_RNG_MAP std::int32_t vector_shift() const { return vector == 8 ? 3 : vector / 2; }

  // Calls for one vector, and the elements of each.
  DIST_RNG_MAP std::int32_t calls() const { return (vector + 3) / 4; }
  DIST_RNG_MAP std::int32_t share() const { return vector < 4 ? vector : 4; }
};

struct PhiloxPlace {
  std::int64_t thread;
  std::int64_t call;
  std::int32_t lane;
};

// `divide` is a / threads; a device has a faster way than the division.
template <typename Divide>
DIST_RNG_MAP PhiloxPlace place_of(const PhiloxReach& reach, std::int64_t threads,
                                  std::int64_t index, const Divide& divide) {
  if (reach.vector != 0) {
    const std::int64_t group = index >> reach.vector_shift();
    const std::int64_t turn = divide(group);
    const auto element = static_cast<std::int32_t>(index & (reach.vector - 1));
    return {group - turn * threads, turn * reach.calls() + element / 4, element % 4};
  }
  const std::int64_t stride = divide(index);
  return {index - stride * threads, stride >> reach.unroll_shift(),
          static_cast<std::int32_t>(stride & (reach.unroll - 1))};
}

}  // namespace dist_rng
