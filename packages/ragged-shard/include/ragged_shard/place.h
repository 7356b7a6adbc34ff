// Placing tensors one after the other at the earliest legal start: for one shard size exactly, and
// for a range of shard sizes as a bound. The C++ counterpart of reference.py's advance(), may_fit() and place().
#pragma once

#include <vector>

#include "ragged_shard/problem.h"

namespace ragged_shard {

// Shard sizes are multiples of `step` here, and what follows from that for each tensor.
struct Lattice {
  Size step;
  std::vector<Size> joint;  // lcm(step, block): shard sizes that the tensor's blocks divide

  Lattice(const Problem& problem, Size step_);
};

// Shard sizes low <= S <= high, both on the lattice.
struct Range {
  Size low;
  Size high;
};

// Everything so far ends at boundary * S + offset or behind it, for each S of a range at which it
// can be placed at all; exactly there if the range is a single S. Counting from a boundary, not
// from 0, is what makes ranges useful: a tensor that was pushed to boundary k ends at
// k * S + numel, whatever S is.
struct Cursor {
  Size boundary = 0;
  Size offset = 0;
};

// Moves the cursor behind a tensor; false if it fits nowhere. Shard sizes are multiples of `step`;
// `joint` is lcm(step, block); `slack` is how many elements of padding fit between the cursor and
// the buffer's end for the largest S, and not negative.
bool advance(Cursor& cursor, const Tensor& tensor, Size step, Size joint, Range range, Size slack);

// False only if no shard size of the range of the lattice holds the tensors; exact if
// low == high. With `starts`, and low == high, also where each tensor starts.
bool may_fit(const Problem& problem, const Lattice& lattice, Range range,
             std::vector<Size>* starts = nullptr);

}  // namespace ragged_shard
