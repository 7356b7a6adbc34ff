// torch's CPU random engine: MT19937, drawn in bulk and skipped in bulk.
//
// Nouns: a *block* is the 624 words that one twist makes; a *word* is one tempered 32-bit draw.
// The engine twists as late as torch does, so its state can be handed back at any place.
#pragma once

#include <cstdint>

#include "torch_state.h"

namespace dist_rng {

class Mt19937 {
 public:
  explicit Mt19937(const TorchState& state);

  // Writes the place reached, and only that: the rest of `state` stays as it was.
  void store(TorchState& state) const;

  // The next `count` words.
  void take(std::uint32_t* words, std::int64_t count);

  // Passes over `count` words: twists without tempering, or jumps where that is cheaper.
  void skip(std::int64_t count);

  // Passes over words until `draw` words have been drawn since the engine was made.
  void seek(std::int64_t draw) { skip(draw - drawn_); }

 private:
  static constexpr int kBlock = TorchState::kWords;

  alignas(64) std::uint32_t block_[kBlock];
  int used_;                // words drawn of the block
  std::int64_t drawn_ = 0;  // words drawn since the engine was made
};

}  // namespace dist_rng
