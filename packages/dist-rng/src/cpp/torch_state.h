// The 5056 bytes of torch.Generator("cpu").get_state().
//
// Source: ATen/core/MT19937RNGEngine.h for the meaning of left and next; the layout itself is
// that of the state tensor, which tests/test_mt19937.py checks against torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dist_rng {

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

}  // namespace dist_rng
