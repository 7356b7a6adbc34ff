// A code book, and the table by which the nearest code of a number is found.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp {

// Numbers that agree in sign and in the upper half of their bits share a bucket; of magnitudes up to
// 1, buckets are so narrow that at most one boundary between codes lies in each. The bits of a
// negative number count as their complement, so that the upper half fits 15 bits.
constexpr int kBuckets = 1 << 15;

class Book {
 public:
  // The values of all codes, the boundaries between those from 0 up, and the code of 0.
  Book(std::vector<float> values, const std::vector<float>& boundaries, int zero);

  const float* values() const { return values_.data(); }

  // For each bucket in the upper half a code; in the lower half what, added to a number's lower half,
  // carries over to the next code if that lies beyond the boundary in the bucket. Above 1: nothing.
  const std::uint32_t* lookup() const { return lookup_.data(); }

  int zero() const { return zero_; }

 private:
  std::vector<float> values_;
  std::vector<std::uint32_t> lookup_;
  int zero_;
};

}  // namespace fsdp
