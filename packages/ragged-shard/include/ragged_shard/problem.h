// What the search is given, and the words of layout.py as C++ types. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace ragged_shard {

using Size = std::int64_t;
inline constexpr Size kMost = std::numeric_limits<Size>::max();

// One tensor, in elements; 1 <= block <= numel unless numel is 0. The caller has worked aligned
// starts into both.
struct Tensor {
  Size numel;
  Size block;
};

// Tensors in the order of the buffer. Their sizes sum to at most kMost.
struct Problem {
  std::vector<Tensor> tensors;
  std::vector<Size> remaining;  // remaining[i]: elements of tensors i, i + 1, ..
  Size ranks;
  Size step;  // the shard size is a multiple of it

  Problem(std::vector<Tensor> tensors_, Size ranks_, Size step_)
      : tensors(std::move(tensors_)), remaining(tensors.size() + 1, 0), ranks(ranks_), step(step_) {
    for (std::size_t i = tensors.size(); i-- > 0;) {
      remaining[i] = remaining[i + 1] + tensors[i].numel;
    }
  }

  Size total() const { return remaining[0]; }
};

// The least common multiple of two positive numbers, or kMost if it is larger: as no shard is,
// that stands for "none".
inline Size lcm_or_most(Size a, Size b) {
  const Size factor = b / std::gcd(a, b);
  return a > kMost / factor ? kMost : a * factor;
}

inline Size round_down(Size value, Size step) { return value / step * step; }

// Or kMost, if the multiple is larger than that.
inline Size round_up(Size value, Size step) {
  const Size over = value % step;
  if (over == 0) return value;
  return value > kMost - (step - over) ? kMost : value + (step - over);
}

}  // namespace ragged_shard
