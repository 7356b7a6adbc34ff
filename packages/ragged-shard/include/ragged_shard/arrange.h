// An order that wastes little for one shard size. The C++ counterpart of arrange() in reference.py.
#pragma once

#include <vector>

#include "ragged_shard/problem.h"

namespace ragged_shard {

// Places the tensors one by one, each time the one that needs the least padding: of equals the one
// with the largest block, then the largest, then the first. Returns their places in that order, or
// nothing if they do not fit. Takes time proportional to the number of tensors times that of
// different ones.
std::vector<Size> arrange(const Problem& problem, Size shard);

}  // namespace ragged_shard
