#include "ragged_shard/search.h"

#include <algorithm>

#include "ragged_shard/place.h"

namespace ragged_shard {
namespace {

// The tensors of which one has more than 2 * S elements: two boundaries fall into each, wherever
// it starts, so S must be a multiple of its block.
struct Large {
  Size numel;
  Size step;  // lcm of the problem's step, this block and those of all larger tensors
};

// Largest first.
std::vector<Large> large_tensors(const Problem& problem) {
  std::vector<Tensor> sorted = problem.tensors;
  std::sort(sorted.begin(), sorted.end(), [](const Tensor& a, const Tensor& b) {
    return a.numel != b.numel ? a.numel > b.numel : a.block < b.block;
  });
  std::vector<Large> large;
  Size step = problem.step;
  for (const Tensor& tensor : sorted) {
    step = lcm_or_most(step, tensor.block);
    large.push_back({tensor.numel, step});
  }
  return large;
}

// Every shard has at least so many elements, whatever the order.
Size least_shard(const Problem& problem) {
  Size least = problem.total() / problem.ranks + (problem.total() % problem.ranks != 0);
  for (const Tensor& tensor : problem.tensors) {
    if (tensor.numel > 0) least = std::max(least, tensor.block);
  }
  return round_up(least, problem.step);
}

bool fits(const Problem& problem, Size shard) {
  return may_fit(problem, Lattice(problem, problem.step), {shard, shard});
}

// A small shard size that fits, from `from` to `most`, or kMost if none is found: for each step
// that large tensors could ask for, doubles the distance from `from` and halves it again. The
// paper's search; it is at most some factor off, and here only the answer of a search that gave up.
Size any_that_fits(const Problem& problem, Size from, Size most) {
  Size best = kMost;
  Size last_step = 0;
  std::vector<Large> steps = large_tensors(problem);
  steps.insert(steps.begin(), {kMost, problem.step});
  for (const Large& large : steps) {
    const Size top = std::min(most, best) / large.step;  // in steps, as all that follows
    const Size bottom = from / large.step + (from % large.step != 0);
    if (large.step == last_step || bottom > top) continue;
    last_step = large.step;
    Size low = bottom - 1, high = bottom;
    while (!fits(problem, high * large.step) && high < top) {
      low = high;
      high = bottom + std::min(2 * (high - bottom) + 1, top - bottom);
    }
    if (!fits(problem, high * large.step)) continue;
    while (high - low > 1) {
      const Size middle = low + (high - low) / 2;
      (fits(problem, middle * large.step) ? high : low) = middle;
    }
    best = std::min(best, high * large.step);
  }
  return best;
}

}  // namespace

Found search(const Problem& problem, Size most_nodes) {
  Found found;
  // All in the first shard always fits, but the buffer may be too large.
  const Size most =
      std::min(round_up(problem.total(), problem.step),
               round_down(kMost / problem.ranks, problem.step));
  const std::vector<Large> large = large_tensors(problem);
  Size from = least_shard(problem);  // all below is refuted
  std::size_t number = large.size();  // of tensors that are larger than 2 * from
  bool ended = false;
  while (!ended && from <= most && found.nodes < most_nodes) {
    while (number > 0 && large[number - 1].numel / 2 + (large[number - 1].numel % 2) <= from) {
      --number;
    }
    // Up to `until` the same tensors are large.
    const Size until = number == 0 ? most : std::min(most, (large[number - 1].numel - 1) / 2);
    const Size step = number == 0 ? problem.step : large[number - 1].step;
    from = round_up(from, step);
    if (from > until) {
      from = until + 1;
      continue;
    }
    // Leftmost first: refute a range, then one of twice as many sizes; where a range cannot be
    // refuted, try its first half, down to a single size.
    const Lattice lattice(problem, step);
    const Size last = until / step;
    Size first = from / step, count = 1;
    while (first <= last && found.nodes < most_nodes) {
      count = std::min(count, last - first + 1);
      ++found.nodes;
      if (!may_fit(problem, lattice, {first * step, (first + (count - 1)) * step})) {
        first += count;
        count *= 2;
      } else if (count == 1) {
        ended = true;
        break;
      } else {
        count /= 2;
      }
    }
    from = first <= last ? first * step : until + 1;
  }
  found.proved = from;
  found.shard = ended ? from : from > most ? kMost : any_that_fits(problem, from, most);
  found.any = found.shard <= most;
  if (found.any) {
    may_fit(problem, Lattice(problem, problem.step), {found.shard, found.shard}, &found.starts);
  }
  return found;
}

}  // namespace ragged_shard
