#include <algorithm>
#include <cstddef>

#include "fill.h"
#include "grouped.h"
#include "mt19937.h"
#include "normal_pair.h"

namespace dist_rng {
namespace {

// The part of a run whose draws are first <= draw < last; its count may be 0 or less.
Run part_of(const Run& run, std::int64_t first, std::int64_t last) {
  const std::int64_t skipped = std::max<std::int64_t>(first - run.draw, 0);
  const std::int64_t end = std::min(run.draw + run.count, last);
  return {run.draw + skipped, end - run.draw - skipped, run.local + skipped * run.stride,
          run.stride};
}

}  // namespace

void fill_normal_blocks(TorchState& state, const Target& target, const Arguments& arguments) {
  constexpr std::int64_t kBlock = 16;
  Mt19937 engine(state);
  const Kernel kernel = kernel_set().normal_blocks(target.dtype, arguments);
  std::byte* data = static_cast<std::byte*>(target.data);
  const std::int64_t numel = target.global_numel;
  // With a remainder the last 16 elements are drawn again, as one more block.  It comes after
  // the words of all elements where uniforms are drawn in place (f32, f64; in 2.11 all), and
  // after those of the whole blocks where they are drawn in a buffer (bf16, f16).
  const bool ragged = numel % kBlock != 0;
  const bool in_place = target.dtype == Dtype::kFloat32 || target.dtype == Dtype::kFloat64 ||
                        arguments.release == Release::kTorch211;
  const std::int64_t tail = in_place ? numel : numel / kBlock * kBlock;
  const std::int64_t regular = ragged ? numel - kBlock : numel;
  GroupedElements blocks(engine, kernel, arguments, target.dtype, {0, 0});
  GroupedElements last(engine, kernel, arguments, target.dtype, {regular, tail * kernel.words});
  walk(target.grid, [&](const Run& run) {
    const Run before = part_of(run, 0, regular), after = part_of(run, regular, numel);
    if (before.count > 0) blocks.draw(before, data);
    if (after.count > 0) last.draw(after, data);
  });
  engine.seek((tail + (ragged ? kBlock : 0)) * kernel.words);
  engine.store(state);
}

void fill_normal_pairs(TorchState& state, const Target& target, const Arguments& arguments) {
  if (target.global_numel == 0) return;
  constexpr std::int64_t kPairWords = 4;
  Mt19937 engine(state);
  const Kernel kernel = kernel_set().normal_pairs(target.dtype, arguments);
  std::byte* data = static_cast<std::byte*>(target.data);
  // A sample left by an earlier draw is the first element; pairs follow.
  const std::int64_t cached = state.normal_is_valid ? 1 : 0;
  const double earlier = state.normal_y;
  GroupedElements pairs(engine, kernel, arguments, target.dtype, {cached, 0});
  walk(target.grid, [&](const Run& run) {
    const Run first = part_of(run, 0, cached), rest = part_of(run, cached, target.global_numel);
    if (first.count > 0) {
      const auto offset = first.local * std::ptrdiff_t(size_of(target.dtype));
      kernel.convert(arguments, nullptr, &earlier, data + offset, 1);
    }
    if (rest.count > 0) pairs.draw(rest, data);
  });
  const std::int64_t drawn = target.global_numel - cached;
  state.normal_is_valid = 0;
  state.normal_y = 0;
  if (drawn % 2 != 0) {
    // The last pair again, from the generator's own state: the walk may have taken its words.
    Mt19937 again(state);
    again.seek((drawn - 1) / 2 * kPairWords);
    std::uint32_t words[kPairWords];
    again.take(words, kPairWords);
    const auto unit = [](const std::uint32_t* word) {
      return static_cast<double>(std::uint64_t{word[0] & 0x1fffff} << 32 | word[1]) * 0x1p-53;
    };
    state.normal_is_valid = 1;
    state.normal_y = normal_pair(unit(words), unit(words + 2)).second;
    again.store(state);
    return;
  }
  engine.seek(drawn / 2 * kPairWords);
  engine.store(state);
}

}  // namespace dist_rng
