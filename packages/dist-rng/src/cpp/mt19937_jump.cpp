#include "mt19937_jump.h"

#include <algorithm>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "gf2.h"
#include "kernels/kernel_set.h"
#include "torch_state.h"

namespace dist_rng {
namespace {

constexpr int kBlock = TorchState::kWords;
constexpr std::size_t kKept = 64;  // distances; 20 KB each

// A twist takes 50 ns with 512-bit vectors and 70 ns with 256.  A jump takes 0.2 ms, and its
// recipe 1 to 2 ms more.
constexpr std::int64_t kPaysAtOnce = 32'000, kPaysAgain = 4'000;  // blocks

// The exponents i with c(i) = 1 of t^(kBlock * blocks): a jump's recipe.
using Recipe = std::vector<std::uint16_t>;

Recipe make_recipe(std::int64_t blocks) {
  const Polynomial power = power_of_t(static_cast<std::uint64_t>(blocks) * kBlock);
  Recipe recipe;
  for (int i = 0; i < kDegree; ++i) {
    if (power[static_cast<std::size_t>(i / 64)] >> (i % 64) & 1) {
      recipe.push_back(static_cast<std::uint16_t>(i));
    }
  }
  return recipe;
}

// The distances seen last: a training step skips the same few again and again.
class Recipes {
 public:
  // Whether this distance was asked about before; from now on it was.
  bool known(std::int64_t blocks) {
    const std::lock_guard lock(mutex_);
    return !front(blocks);
  }

  std::shared_ptr<const Recipe> find_or_make(std::int64_t blocks) {
    {
      const std::lock_guard lock(mutex_);
      front(blocks);
      if (const auto& recipe = distances_.front().recipe) return recipe;
    }
    auto made = std::make_shared<const Recipe>(make_recipe(blocks));
    const std::lock_guard lock(mutex_);
    front(blocks);
    return distances_.front().recipe = std::move(made);
  }

 private:
  struct Distance {
    std::int64_t blocks;
    std::shared_ptr<const Recipe> recipe;  // null until a jump needs it
  };

  // Brings the distance to the front; true if it is new there.
  bool front(std::int64_t blocks) {
    const auto found = std::find_if(distances_.begin(), distances_.end(),
                                    [&](const Distance& each) { return each.blocks == blocks; });
    if (found != distances_.end()) {
      distances_.splice(distances_.begin(), distances_, found);
      return false;
    }
    distances_.push_front({blocks, nullptr});
    if (distances_.size() > kKept) distances_.pop_back();
    return true;
  }

  std::mutex mutex_;
  std::list<Distance> distances_;
};

Recipes& recipes() {
  static Recipes instance;
  return instance;
}

}  // namespace

bool jump_pays(std::int64_t blocks) {
  return blocks >= kPaysAtOnce || (blocks >= kPaysAgain && recipes().known(blocks));
}

void jump_blocks(std::uint32_t* block, std::int64_t blocks) {
  const std::shared_ptr<const Recipe> recipe = recipes().find_or_make(blocks);
  // All words x(k + i) that the sum needs: i + 623 is below kDegree + 623, so 33 blocks do.
  constexpr int kBlocks = (kDegree + kBlock - 1) / kBlock + 1;
  std::vector<std::uint32_t> words(static_cast<std::size_t>(kBlocks) * kBlock);
  const KernelSet& kernels = kernel_set();
  std::copy_n(block, kBlock, words.begin());
  for (int b = 1; b < kBlocks; ++b) {
    std::uint32_t* next = words.data() + static_cast<std::ptrdiff_t>(b) * kBlock;
    std::copy_n(next - kBlock, kBlock, next);
    kernels.twist(next);
  }
  kernels.xor_windows(words.data(), recipe->data(), static_cast<int>(recipe->size()), block);
}

}  // namespace dist_rng
