#include "code_book.h"

#include <bit>
#include <stdexcept>
#include <utility>

namespace fsdp {

namespace {

// The bucket of 1.
constexpr std::uint32_t kBucketOfOne = 127 << 7;

// Returns an entry of the table: `code`, or the next code for a lower half above `threshold`.
std::uint32_t entry(std::uint32_t code, std::uint32_t threshold) {
  return (code << 16) | (0xFFFF - threshold);
}

}  // namespace

CodeBookTable::CodeBookTable(std::vector<float> values, const std::vector<float>& boundaries,
                             int zero)
    : values_(std::move(values)), lookup_(kBuckets), zero_(zero) {
  if (values_.size() != 256) throw std::invalid_argument("expected 256 values of a code book");
  constexpr std::uint32_t kNoThreshold = 0xFFFF;
  const auto zero_code = static_cast<std::uint32_t>(zero);
  std::uint32_t below = 0;  // number of boundaries below the bucket
  for (std::uint32_t bucket = 0; bucket <= kBucketOfOne; ++bucket) {
    std::uint32_t threshold = kNoThreshold;
    const std::uint32_t base = below;
    for (; below < boundaries.size(); ++below) {
      const auto bits = std::bit_cast<std::uint32_t>(boundaries[below]);
      if (bits >> 16 > bucket) break;
      if (bits >> 16 < bucket || below != base) {
        throw std::invalid_argument("expected at most one boundary in each bucket");
      }
      threshold = bits & 0xFFFF;
    }
    lookup_[bucket] = entry(zero_code + base, threshold);
    if (base < zero_code) {  // else negative numbers of this magnitude have the same code
      // Complemented bits reverse the order: "not above the threshold" becomes "at least its
      // complement".
      const std::uint32_t code = zero_code - base - 1;
      lookup_[kBuckets - 1 - bucket] = threshold == kNoThreshold
                                           ? entry(code + 1, kNoThreshold)
                                           : entry(code, kNoThreshold - threshold - 1);
    }
  }
  if (below != boundaries.size()) throw std::invalid_argument("expected boundaries of at most 1");
}

}  // namespace fsdp
