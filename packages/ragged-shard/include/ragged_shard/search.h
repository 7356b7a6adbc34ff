// The smallest shard for tensors in a fixed order. The C++ counterpart of reference.py's search().
#pragma once

#include <vector>

#include "ragged_shard/problem.h"

namespace ragged_shard {

struct Found {
  bool any = false;  // whether there is a layout whose buffer has at most kMost elements
  Size shard = 0;
  Size proved = 0;  // no shard is smaller; equal to `shard` if the search ended
  Size nodes = 0;   // of the search: calls of may_fit() before it ended or gave up
  std::vector<Size> starts;  // in the order of the buffer
};

// Gives up after `most_nodes` nodes, and then returns the best shard that it knows: never by a
// clock, because every rank must find the same.
Found search(const Problem& problem, Size most_nodes);

}  // namespace ragged_shard
