#include <algorithm>
#include <cmath>
#include <cstddef>

#include "fill.h"

namespace dist_rng {
namespace {

// Draws runs of elements that the stream makes in groups: all elements of a group from its words.
//
// Element `origin + i` belongs to group i / granularity, whose words begin at
// `first_word + i / granularity * granularity * words`.
class GroupedElements {
 public:
  struct Start {
    std::int64_t origin;      // draw index of the first group's first element
    std::int64_t first_word;  // of the first group
  };

  GroupedElements(Mt19937& engine, const Kernel& kernel, const Arguments& arguments, Dtype dtype,
                  Start start)
      : engine_(engine), kernel_(kernel), arguments_(arguments), size_(size_of(dtype)),
        start_(start) {}

  // Writes the elements run.draw .. run.draw + run.count to `data`; runs ascend.
  void draw(DrawRun run, std::byte* data) {
    run.draw -= start_.origin;
    while (run.count > 0) {
      const std::int64_t group = run.draw / kernel_.granularity;
      const std::int64_t inside = run.draw % kernel_.granularity;
      std::int64_t count = 0;
      if (inside != 0 || run.count < kernel_.granularity) {
        make_group(group);
        count = std::min(run.count, kernel_.granularity - inside);
        put(group_elements_, inside, data, run, count);
      } else {
        count = full_groups(run, data);
      }
      run.draw += count;
      run.local += count * run.stride;
      run.count -= count;
    }
  }

 private:
  static constexpr std::int64_t kChunk = 512;  // elements; a multiple of every granularity

  void seek(std::int64_t group) {
    engine_.seek(start_.first_word + group * kernel_.granularity * kernel_.words);
  }

  // A group that several runs share is made once.
  void make_group(std::int64_t group) {
    if (group == current_group_) return;
    seek(group);
    engine_.take(words_, std::int64_t{kernel_.granularity} * kernel_.words);
    kernel_.convert(arguments_, words_, nullptr, group_elements_, kernel_.granularity);
    current_group_ = group;
  }

  std::int64_t full_groups(const DrawRun& run, std::byte* data) {
    const std::int64_t groups = std::min(run.count, kChunk) / kernel_.granularity;
    const std::int64_t count = groups * kernel_.granularity;
    seek(run.draw / kernel_.granularity);
    engine_.take(words_, count * kernel_.words);
    if (run.stride == 1) {
      std::byte* out = data + run.local * std::ptrdiff_t(size_);
      kernel_.convert(arguments_, words_, nullptr, out, count);
    } else {
      kernel_.convert(arguments_, words_, nullptr, packed_, count);
      put(packed_, 0, data, run, count);
    }
    return count;
  }

  void put(const std::uint64_t* elements, std::int64_t first, std::byte* data, const DrawRun& run,
           std::int64_t count) {
    const auto* from = reinterpret_cast<const std::byte*>(elements) + first * std::ptrdiff_t(size_);
    copy_spaced(from, 1, data + run.local * std::ptrdiff_t(size_), run.stride, count, size_);
  }

  Mt19937& engine_;
  const Kernel kernel_;
  const Arguments& arguments_;
  const std::size_t size_;
  const Start start_;
  std::int64_t current_group_ = -1;
  alignas(64) std::uint32_t words_[2 * kChunk];
  alignas(64) std::uint64_t packed_[kChunk];
  alignas(64) std::uint64_t group_elements_[16];
};

// The part of a run whose draws are first <= draw < last; its count may be 0 or less.
DrawRun part_of(const DrawRun& run, std::int64_t first, std::int64_t last) {
  const std::int64_t skipped = std::max<std::int64_t>(first - run.draw, 0);
  const std::int64_t end = std::min(run.draw + run.count, last);
  return {run.draw + skipped, end - run.draw - skipped, run.local + skipped * run.stride,
          run.stride};
}

}  // namespace

NormalPair normal_pair(double u1, double u2) {
  constexpr double kPi = 3.14159265358979323846;
  const double radius = ::sqrt(-2.0 * ::log1p(-u2));
  const double theta = 2.0 * kPi * u1;
  return {radius * ::cos(theta), radius * ::sin(theta)};
}

void fill_normal_blocks(TorchState& state, const FillTarget& target, const Arguments& arguments) {
  constexpr std::int64_t kBlock = 16;
  Mt19937 engine(state);
  const Kernel kernel = kernel_set().normal_blocks(target.dtype, arguments);
  std::byte* data = static_cast<std::byte*>(target.data);
  const std::int64_t numel = target.global_numel;
  // With a remainder the last 16 elements are drawn again as one more block. Its words come after
  // those of all elements where uniforms are drawn in place (f32, f64; in 2.11 all dtypes), and
  // after those of the full blocks where they are drawn in a buffer (bf16, f16).
  const bool remainder = numel % kBlock != 0;
  const bool in_place = target.dtype == Dtype::kFloat32 || target.dtype == Dtype::kFloat64 ||
                        arguments.release == TorchRelease::kTorch211;
  const std::int64_t tail = in_place ? numel : numel / kBlock * kBlock;
  const std::int64_t regular = remainder ? numel - kBlock : numel;
  GroupedElements blocks(engine, kernel, arguments, target.dtype, {0, 0});
  GroupedElements last(engine, kernel, arguments, target.dtype, {regular, tail * kernel.words});
  walk(target.grid, [&](const DrawRun& run) {
    const DrawRun before = part_of(run, 0, regular), after = part_of(run, regular, numel);
    if (before.count > 0) blocks.draw(before, data);
    if (after.count > 0) last.draw(after, data);
  });
  engine.seek((tail + (remainder ? kBlock : 0)) * kernel.words);
  engine.store(state);
}

void fill_normal_pairs(TorchState& state, const FillTarget& target, const Kernel& kernel,
                       const Arguments& arguments) {
  if (target.global_numel == 0) return;
  constexpr std::int64_t kPairWords = 4;
  Mt19937 engine(state);
  std::byte* data = static_cast<std::byte*>(target.data);
  // The first element is the sample that an earlier draw cached, if there is one; pairs follow.
  const std::int64_t cached = state.normal_is_valid ? 1 : 0;
  const double earlier = state.normal_y;
  GroupedElements pairs(engine, kernel, arguments, target.dtype, {cached, 0});
  walk(target.grid, [&](const DrawRun& run) {
    const DrawRun first = part_of(run, 0, cached), rest = part_of(run, cached, target.global_numel);
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
    // Draw the last pair again from the initial state: the walk may be past its words.
    Mt19937 last_pair(state);
    last_pair.seek((drawn - 1) / 2 * kPairWords);
    std::uint32_t words[kPairWords];
    last_pair.take(words, kPairWords);
    const auto unit = [](const std::uint32_t* word) {
      return static_cast<double>(std::uint64_t{word[0] & 0x1fffff} << 32 | word[1]) * 0x1p-53;
    };
    state.normal_is_valid = 1;
    state.normal_y = normal_pair(unit(words), unit(words + 2)).second;
    last_pair.store(state);
    return;
  }
  engine.seek(drawn / 2 * kPairWords);
  engine.store(state);
}

}  // namespace dist_rng
