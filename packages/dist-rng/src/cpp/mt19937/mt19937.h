// torch's CPU random engine: its state, and MT19937 drawn and skipped in bulk.
//
// Terms: a *block* is the 624 words that one twist makes; a *word* is one tempered 32-bit draw.
// The engine twists as late as torch does, so its state can be stored after any word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace dist_rng {

// The 5056 bytes of torch.Generator("cpu").get_state().
//
// Source: ATen/core/MT19937RNGEngine.h for the meaning of left and next; the layout itself is
// that of the state tensor, which tests/test_mt19937.py compares with torch.
struct TorchState {
  static constexpr int kWords = 624;

  std::uint64_t seed;
  std::int32_t left;  // 1 + words of the block not yet drawn; 1 of a generator just seeded
  std::int32_t seeded;
  std::uint64_t next;           // words of the block already drawn; 0 of one just seeded
  std::uint64_t words[kWords];  // the block, a word in the low half of each
  double normal_x;
  double normal_y;  // the second sample of normal_'s serial path, if normal_is_valid
  double normal_rho;
  std::int32_t normal_is_valid;
  std::int32_t padding;
  float next_float_normal_sample;  // no CPU op of torch uses it
  bool has_next_float_normal_sample;
  char tail_padding[3];
};

static_assert(sizeof(TorchState) == 5056);
static_assert(offsetof(TorchState, words) == 24);
static_assert(offsetof(TorchState, normal_y) == 24 + 8 * TorchState::kWords + 8);

class Mt19937 {
 public:
  explicit Mt19937(const TorchState& state);

  // Writes the position in the stream, and nothing else of `state`.
  void store(TorchState& state) const;

  // The next `count` words.
  void take(std::uint32_t* words, std::int64_t count);

  // Skips `count` words: twists without tempering, or jumps where that is cheaper.
  void skip(std::int64_t count);

  // Skips words until `draw` words have been drawn since the engine was constructed.
  void seek(std::int64_t draw) { skip(draw - drawn_); }

  // Skips to the position of `later`; returns how many words that are, or nothing if they are more
  // than `limit`. The words in between are found by twisting: no formula has the distance.
  std::optional<std::int64_t> skip_to(const Mt19937& later, std::int64_t limit);

 private:
  static constexpr int kBlock = TorchState::kWords;

  alignas(64) std::uint32_t block_[kBlock];
  int used_;                // words drawn of the block
  std::int64_t drawn_ = 0;  // words drawn since construction
};

}  // namespace dist_rng
