// The part of CUDA that is needed to run src/cuda on the host: a launch is a loop over blocks and
// threads.
//
// It tests the arithmetic of the kernels without a device; element types and formulas are those of
// the host emulator.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../src/cpp/philox/philox.h"

#include "../../src/cpp/kernels/element.h"

#define __global__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline thread_local dim3 blockIdx, threadIdx, gridDim;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }

#define DIST_RNG_LAUNCH(kernel, grid, stream, ...)                     \
  do {                                                                 \
    (void)(stream);                                                    \
    gridDim = grid;                                                    \
    for (unsigned y = 0; y < gridDim.y; ++y) {                         \
      for (unsigned x = 0; x < gridDim.x; ++x) {                       \
        for (unsigned t = 0; t < 256; ++t) {                           \
          blockIdx = dim3(x, y, 0);                                    \
          threadIdx = dim3(t, 0, 0);                                   \
          kernel(__VA_ARGS__);                                         \
        }                                                              \
      }                                                                \
    }                                                                  \
  } while (false)
