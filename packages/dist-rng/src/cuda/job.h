// What Python hands to a launch: plain data, the same bytes as Job in cuda_library.py.
#pragma once

#include <cstdint>

namespace dist_rng {

constexpr int kJobDims = 8;

// Index k of the dim lies at k / length * period + k % length of the global dim: pieces of one
// length, evenly spaced.
struct JobDim {
  std::int64_t size;
  std::int64_t length;
  std::int64_t period;
  std::int64_t draw_stride;
  std::int64_t local_stride;
};

// Fills what one launch of torch draws of a box: its elements `first` .. `first + count`, counted
// with the last dim fastest.
struct Job {
  std::uint64_t data;           // address of the local tensor's first element
  std::uint64_t probabilities;  // address; 0 but for Bernoulli of a tensor
  std::int32_t kind;            // PhiloxKind
  std::int32_t dtype;           // Dtype
  std::int32_t unroll;          // PhiloxReach
  std::int32_t vector;
  double a;                     // PhiloxArguments
  double b;
  std::uint64_t modulus;
  std::int64_t base;
  std::uint64_t seed;
  std::uint64_t offset;          // the generator's before the draw
  std::uint64_t seed_address;    // on the device, 0 unless a graph is captured; then the two
  std::uint64_t offset_address;  // values above have no meaning
  std::int64_t after;            // what the launch's offset has on top
  std::int64_t start;            // the launch: PhiloxLaunch
  std::int64_t stop;
  std::int64_t threads;
  std::int64_t first;
  std::int64_t count;
  std::int64_t draw;   // draw index of element 0
  std::int64_t local;  // place of element 0 in the local tensor
  std::int32_t device;
  std::int32_t dims;
  JobDim dim[kJobDims];
};

}  // namespace dist_rng
