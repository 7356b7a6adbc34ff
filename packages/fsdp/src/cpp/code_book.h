// The values of a code book, and a lookup table that finds the nearest code of a number.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp {

// A bucket has all numbers with the same sign and the same upper half of their bits. Up to a
// magnitude of 1, buckets are so narrow that each has at most one boundary between codes. The bits
// of negative numbers are complemented, so that the upper half fits in 15 bits.
constexpr int kBuckets = 1 << 15;

class CodeBookTable {
 public:
  // Takes the values of all codes, the boundaries between the values from 0 up, and the code of 0.
  CodeBookTable(std::vector<float> values, const std::vector<float>& boundaries, int zero);

  const float* values() const { return values_.data(); }

  // For each bucket: a code in the upper half; and in the lower half a number that, added to the
  // lower half of a value's bits, carries to the next code if the value is above the boundary in
  // the bucket. Magnitudes above 1 have no entries.
  const std::uint32_t* lookup() const { return lookup_.data(); }

  int zero() const { return zero_; }

 private:
  std::vector<float> values_;
  std::vector<std::uint32_t> lookup_;
  int zero_;
};

}  // namespace fsdp
