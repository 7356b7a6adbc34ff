#include "book.h"

#include <bit>
#include <stdexcept>
#include <utility>

namespace fsdp {

namespace {

// The bucket of 1.
constexpr std::uint32_t kOne = 127 << 7;

// An entry of the table: `code`, or the next one for what lies above `threshold` in its lower half.
std::uint32_t entry(std::uint32_t code, std::uint32_t threshold) {
  return (code << 16) | (0xFFFF - threshold);
}

}  // namespace

Book::Book(std::vector<float> values, const std::vector<float>& boundaries, int zero)
    : values_(std::move(values)), lookup_(kBuckets), zero_(zero) {
  if (values_.size() != 256) throw std::invalid_argument("a code book has 256 values");
  constexpr std::uint32_t kNone = 0xFFFF;
  const auto middle = static_cast<std::uint32_t>(zero);
  std::uint32_t below = 0;  // boundaries
  for (std::uint32_t bucket = 0; bucket <= kOne; ++bucket) {
    std::uint32_t threshold = kNone;
    const std::uint32_t base = below;
    for (; below < boundaries.size(); ++below) {
      const auto bits = std::bit_cast<std::uint32_t>(boundaries[below]);
      if (bits >> 16 > bucket) break;
      if (bits >> 16 < bucket || below != base) throw std::invalid_argument("boundaries too close");
      threshold = bits & 0xFFFF;
    }
    lookup_[bucket] = entry(middle + base, threshold);
    if (base < middle) {  // else no negative number of that magnitude has another code
      // Of the complement of a lower half, not above the threshold is at least its complement.
      const std::uint32_t code = middle - base - 1;
      lookup_[kBuckets - 1 - bucket] =
          threshold == kNone ? entry(code + 1, kNone) : entry(code, kNone - threshold - 1);
    }
  }
  if (below != boundaries.size()) throw std::invalid_argument("a boundary lies above 1");
}

}  // namespace fsdp
