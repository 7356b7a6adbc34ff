#include "mt19937.h"

#include <algorithm>

#include "../kernels/kernel_set.h"
#include "mt19937_jump.h"

namespace dist_rng {

Mt19937::Mt19937(const TorchState& state) : used_(kBlock + 1 - state.left) {
  for (int i = 0; i < kBlock; ++i) block_[i] = static_cast<std::uint32_t>(state.words[i]);
}

void Mt19937::store(TorchState& state) const {
  if (drawn_ == 0) return;  // a generator just seeded has next = 0, and keeps it
  state.left = kBlock + 1 - used_;
  state.next = static_cast<std::uint64_t>(used_);
  for (int i = 0; i < kBlock; ++i) state.words[i] = block_[i];
}

void Mt19937::take(std::uint32_t* words, std::int64_t count) {
  const KernelSet& kernels = kernel_set();
  drawn_ += count;
  while (count > 0) {
    if (used_ == kBlock) {
      kernels.twist(block_);
      used_ = 0;
    }
    const int part = static_cast<int>(std::min<std::int64_t>(count, kBlock - used_));
    kernels.temper(block_ + used_, words, part);
    used_ += part;
    words += part;
    count -= part;
  }
}

void Mt19937::skip(std::int64_t count) {
  drawn_ += count;
  if (count <= kBlock - used_) {
    used_ += static_cast<int>(count);
    return;
  }
  const std::int64_t beyond = count - (kBlock - used_);
  std::int64_t twists = (beyond + kBlock - 1) / kBlock;
  used_ = static_cast<int>(beyond - (twists - 1) * kBlock);
  const KernelSet& kernels = kernel_set();
  // A jump needs a block that a twist made: the low bits of a seed's first word are not part of
  // the recurrence.
  kernels.twist(block_);
  if (jump_pays(--twists)) {
    jump_blocks(block_, twists);
    return;
  }
  for (; twists > 0; --twists) kernels.twist(block_);
}

std::optional<std::int64_t> Mt19937::skip_to(const Mt19937& later, std::int64_t limit) {
  const KernelSet& kernels = kernel_set();
  const auto same_block = [&] {
    // Most blocks differ in one word already.
    return block_[kBlock - 1] == later.block_[kBlock - 1] &&
           std::equal(block_, block_ + kBlock, later.block_);
  };
  std::int64_t words = later.used_ - used_;  // if `later` is in the block of this engine
  if (same_block() && words < 0) return std::nullopt;  // the period is 2^19937 - 1
  while (words <= limit && !same_block()) {
    kernels.twist(block_);
    words += kBlock;
  }
  if (words > limit) return std::nullopt;
  used_ = later.used_;
  drawn_ += words;
  return words;
}

}  // namespace dist_rng
