// Elements that are drawn in groups: a group's words make all of its elements together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "kernels/kernel_set.h"
#include "mt19937.h"
#include "scatter.h"
#include "walk.h"

namespace dist_rng {

// Draws runs out of groups that follow one another in the stream.
//
// Element `origin + i` belongs to group i / granularity, whose words begin at
// `first_word + i / granularity * granularity * words`.
class GroupedElements {
 public:
  struct Place {
    std::int64_t origin;
    std::int64_t first_word;
  };

  GroupedElements(Mt19937& engine, const Kernel& kernel, const Arguments& arguments, Dtype dtype,
                  Place place)
      : engine_(engine), kernel_(kernel), arguments_(arguments), size_(size_of(dtype)),
        place_(place) {}

  // Elements run.draw .. run.draw + run.count to their places in `data`; runs ascend.
  void draw(Run run, std::byte* data) {
    run.draw -= place_.origin;
    while (run.count > 0) {
      const std::int64_t group = run.draw / kernel_.granularity;
      const std::int64_t inside = run.draw % kernel_.granularity;
      std::int64_t count = 0;
      if (inside != 0 || run.count < kernel_.granularity) {
        hold(group);
        count = std::min(run.count, kernel_.granularity - inside);
        put(held_elements_, inside, data, run, count);
      } else {
        count = whole_groups(run, data);
      }
      run.draw += count;
      run.local += count * run.stride;
      run.count -= count;
    }
  }

 private:
  static constexpr std::int64_t kChunk = 512;  // elements; a multiple of every granularity

  void seek(std::int64_t group) {
    engine_.seek(place_.first_word + group * kernel_.granularity * kernel_.words);
  }

  // Several runs may lie in one group: it is drawn once.
  void hold(std::int64_t group) {
    if (group == held_) return;
    seek(group);
    engine_.take(words_, std::int64_t{kernel_.granularity} * kernel_.words);
    kernel_.convert(arguments_, words_, nullptr, held_elements_, kernel_.granularity);
    held_ = group;
  }

  std::int64_t whole_groups(const Run& run, std::byte* data) {
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

  void put(const std::uint64_t* elements, std::int64_t first, std::byte* data, const Run& run,
           std::int64_t count) {
    const auto* from = reinterpret_cast<const std::byte*>(elements) + first * std::ptrdiff_t(size_);
    copy_spaced(from, 1, data + run.local * std::ptrdiff_t(size_), run.stride, count, size_);
  }

  Mt19937& engine_;
  const Kernel kernel_;
  const Arguments& arguments_;
  const std::size_t size_;
  const Place place_;
  std::int64_t held_ = -1;
  alignas(64) std::uint32_t words_[2 * kChunk];
  alignas(64) std::uint64_t packed_[kChunk];
  alignas(64) std::uint64_t held_elements_[16];
};

}  // namespace dist_rng
