#include "ragged_shard/place.h"

namespace ragged_shard {
namespace {

bool has_multiple(Size of, Range range) { return round_down(range.high, of) >= range.low; }

}  // namespace

bool advance(Cursor& cursor, const Tensor& tensor, Size step, Size joint, Range range, Size slack) {
  if (tensor.numel == 0 || tensor.block == 1) {  // fits wherever the last one ended
    cursor.offset += tensor.numel;
    return true;
  }
  // The next boundary is `ahead` boundaries from the cursor's.
  const Size ahead = cursor.offset < range.low ? 1 : cursor.offset / range.low + 1;
  const bool same = ahead == 1 || cursor.offset / range.high + 1 == ahead;
  const Size room = same ? ahead * range.high - cursor.offset : 0;
  if (!same || tensor.numel <= room) {  // for some S it may fit without padding
    cursor.offset += tensor.numel;
    return true;
  }
  // From here on it crosses the next boundary, whatever S.
  if (joint == step) {  // boundaries are multiples of the block: so is the padding's end
    const Size over = cursor.offset % tensor.block;
    const Size padding = over == 0 ? 0 : tensor.block - over;
    if (padding > slack) return false;  // and the sum below could overflow
    cursor.offset += padding + tensor.numel;
    return true;
  }
  const bool any_multiple = has_multiple(joint, range);
  const Size before = round_down(room, tensor.block);  // whole blocks ahead of the boundary
  if (before > 0 && (tensor.numel - before <= range.high || any_multiple)) {
    cursor = {cursor.boundary + ahead, tensor.numel - before};
    return true;
  }
  // It starts at that boundary, or crosses the one behind it with as many blocks as fit.
  if (tensor.numel <= range.high || any_multiple) {
    cursor = {cursor.boundary + ahead, tensor.numel};
    return true;
  }
  const Size whole = round_down(range.high, tensor.block);
  if (whole == 0 || tensor.numel - whole > range.high) return false;
  cursor = {cursor.boundary + ahead + 1, tensor.numel - whole};
  return true;
}

Lattice::Lattice(const Problem& problem, Size step_) : step(step_) {
  joint.reserve(problem.tensors.size());
  for (const Tensor& tensor : problem.tensors) joint.push_back(lcm_or_most(step, tensor.block));
}

bool may_fit(const Problem& problem, const Lattice& lattice, Range range,
             std::vector<Size>* starts) {
  Cursor cursor;
  for (std::size_t i = 0; i <= problem.tensors.size(); ++i) {
    // Nothing overflows. ranks * high and the sum of the sizes are at most kMost, and the offset
    // together with what remains never exceeds the larger of the two. The boundary never exceeds
    // the ranks: a tensor that fits before the buffer's end does not cross the last boundary.
    const Size slack = (problem.ranks - cursor.boundary) * range.high - cursor.offset -
                       problem.remaining[i];
    if (slack < 0) return false;
    if (i == problem.tensors.size()) break;
    const Tensor& tensor = problem.tensors[i];
    if (!advance(cursor, tensor, lattice.step, lattice.joint[i], range, slack)) return false;
    if (starts != nullptr) {
      starts->push_back(cursor.boundary * range.low + cursor.offset - tensor.numel);
    }
  }
  return true;
}

}  // namespace ragged_shard
