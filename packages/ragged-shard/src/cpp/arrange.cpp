#include "ragged_shard/arrange.h"

#include <algorithm>
#include <tuple>

#include "ragged_shard/place.h"

namespace ragged_shard {
namespace {

// Tensors of one size and one block; `left` are not placed yet, the last of them first in turn.
struct Kind {
  Tensor tensor;
  std::vector<Size> left;
};

// Largest block first, then the largest.
std::vector<Kind> kinds_of(const Problem& problem) {
  const auto key = [&](Size place) {
    const Tensor& tensor = problem.tensors[static_cast<std::size_t>(place)];
    return std::tuple(-tensor.block, -tensor.numel, -place);
  };
  std::vector<Size> places(problem.tensors.size());
  std::iota(places.begin(), places.end(), Size{0});
  std::sort(places.begin(), places.end(), [&](Size a, Size b) { return key(a) < key(b); });
  std::vector<Kind> kinds;
  for (const Size place : places) {
    const Tensor& tensor = problem.tensors[static_cast<std::size_t>(place)];
    if (kinds.empty() || kinds.back().tensor.block != tensor.block ||
        kinds.back().tensor.numel != tensor.numel) {
      kinds.push_back({tensor, {}});
    }
    kinds.back().left.push_back(place);
  }
  return kinds;
}

}  // namespace

std::vector<Size> arrange(const Problem& problem, Size shard) {
  std::vector<Kind> kinds = kinds_of(problem);
  std::vector<Size> order;
  Cursor cursor;
  Size remaining = problem.total();
  for (;;) {
    const Size slack = (problem.ranks - cursor.boundary) * shard - cursor.offset - remaining;
    if (slack < 0) return {};
    if (kinds.empty()) return order;
    Size least = kMost;
    std::size_t chosen = kinds.size();
    Cursor behind;
    for (std::size_t i = 0; i < kinds.size() && least > 0; ++i) {
      const Tensor& tensor = kinds[i].tensor;
      Cursor end = cursor;
      if (!advance(end, tensor, 1, tensor.block, {shard, shard}, slack)) continue;
      const Size padding = (end.boundary - cursor.boundary) * shard - cursor.offset +
                           (end.offset - tensor.numel);
      if (padding >= least) continue;
      least = padding;
      chosen = i;
      behind = end;
    }
    if (chosen == kinds.size()) return {};
    Kind& kind = kinds[chosen];
    cursor = behind;
    remaining -= kind.tensor.numel;
    order.push_back(kind.left.back());
    kind.left.pop_back();
    if (kind.left.empty()) kinds.erase(kinds.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
}

}  // namespace ragged_shard
