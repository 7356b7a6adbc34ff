// The element types of torch's random ops.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dist_rng {

// The values are those of Scalar in philox/kernel_spec.py.
enum class Dtype : int {
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat16,
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kUint16,
  kUint32,
  kUint64,
};

constexpr std::size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
    case Dtype::kInt64:
    case Dtype::kUint64:
      return 8;
    case Dtype::kFloat32:
    case Dtype::kInt32:
    case Dtype::kUint32:
      return 4;
    case Dtype::kBfloat16:
    case Dtype::kFloat16:
    case Dtype::kInt16:
    case Dtype::kUint16:
      return 2;
    default:
      return 1;
  }
}

}  // namespace dist_rng
