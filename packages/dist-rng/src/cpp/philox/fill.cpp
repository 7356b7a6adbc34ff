#include "fill.h"

#include <algorithm>
#include <cstddef>

#include "../kernels/kernel_set.h"

namespace dist_rng {
namespace {

constexpr std::int64_t kChunk = 512;  // calls at a time: words and values fit the L1 cache

class PhiloxFill {
 public:
  PhiloxFill(const PhiloxTarget& target, const PhiloxStream& stream, PhiloxConvert convert,
             const PhiloxArguments& arguments, const void* probabilities)
      : target_(target), stream_(stream), convert_(convert), arguments_(arguments),
        probabilities_(static_cast<const std::byte*>(probabilities)),
        size_(size_of(target.dtype)) {}

  // `run` is inside `launch`; its draws are counted from the launch's first.
  void draw(const PhiloxLaunch& launch, const DrawRun& run) {
    if (stream_.access.vector != 0) {
      vectors(launch, run);
    } else {
      strides(launch, run);
    }
  }

 private:
  // A call's elements are a stride apart: a run longer than a stride uses several lanes of a call.
  void strides(const PhiloxLaunch& launch, const DrawRun& run) {
    const std::int64_t threads = launch.threads, span = threads * stream_.access.unroll;
    const std::int64_t last = run.draw + run.count;
    for (std::int64_t call = run.draw / span; call * span < last; ++call) {
      const std::int64_t low = std::max(run.draw - call * span, std::int64_t{0});
      const std::int64_t high = std::min(last - call * span, span);
      const std::int64_t from = low % threads, to = (high - 1) % threads + 1;
      if (high - low >= threads) {
        lanes(launch, run, call, {0, threads}, {low, high});
      } else if (from < to) {
        lanes(launch, run, call, {from, to}, {low, high});
      } else {  // the run continues from one lane into the next
        lanes(launch, run, call, {from, threads}, {low, high});
        lanes(launch, run, call, {0, to}, {low, high});
      }
    }
  }

  // The elements that threads `of` take from call `call`, as far as they are inside `within`, which
  // is counted from the call's first element.
  void lanes(const PhiloxLaunch& launch, const DrawRun& run, std::int64_t call, IndexRange of,
             IndexRange within) {
    const std::int64_t origin = call * launch.threads * stream_.access.unroll - run.draw;
    for (std::int64_t thread = of.start; thread < of.stop; thread += kChunk) {
      const std::int64_t count = std::min(kChunk, of.stop - thread);
      make_calls(launch, call, thread, count);
      for (int lane = 0; lane < stream_.access.unroll; ++lane) {
        const std::int64_t first = lane * launch.threads + thread;
        const std::int64_t low = std::max(first, within.start);
        const std::int64_t high = std::min(first + count, within.stop);
        if (low < high) put(run, origin + low, low - first, lane, high - low);
      }
    }
  }

  // A call's elements are neighbours: put its words into the order of the elements first.
  void vectors(const PhiloxLaunch& launch, const DrawRun& run) {
    const AccessPattern& access = stream_.access;
    const std::int64_t last = run.draw + run.count;
    for (std::int64_t next = run.draw; next < last;) {
      const std::int64_t group = next / access.vector, turn = group / launch.threads;
      const std::int64_t thread = group % launch.threads;
      const std::int64_t groups =
          std::min({kChunk / access.vector, (last - 1) / access.vector + 1 - group,
                    launch.threads - thread});
      for (int part = 0; part < access.calls(); ++part) {
        make_calls(launch, turn * access.calls() + part, thread, groups);
        for (std::int64_t g = 0; g < groups; ++g) {
          for (int lane = 0; lane < access.elements_per_call(); ++lane) {
            in_order_[g * access.vector + part * 4 + lane] = words_[lane][g];
          }
        }
      }
      const std::int64_t skipped = next - group * access.vector;
      const std::int64_t count = std::min(groups * access.vector - skipped, last - next);
      const std::uint32_t* const words[4] = {in_order_ + skipped, in_order_ + skipped,
                                             in_order_ + skipped, in_order_ + skipped};
      put(words, run, next - run.draw, 0, count);
      next += count;
    }
  }

  void make_calls(const PhiloxLaunch& launch, std::int64_t call, std::int64_t thread,
                  std::int64_t count) {
    kernel_set().philox_calls(stream_.seed, launch.count + static_cast<std::uint64_t>(call),
                              static_cast<std::uint64_t>(thread), count, words_);
  }

  void put(const DrawRun& run, std::int64_t position, std::int64_t first_call, int lane,
           std::int64_t count) {
    const std::uint32_t* const words[4] = {words_[0] + first_call, words_[1] + first_call,
                                           words_[2] + first_call, words_[3] + first_call};
    put(words, run, position, lane, count);
  }

  // Writes `count` elements of the run from `position` on, out of lane `lane` of these words.
  void put(const std::uint32_t* const* words, const DrawRun& run, std::int64_t position, int lane,
           std::int64_t count) {
    const std::ptrdiff_t offset = run.local + position * run.stride;
    std::byte* out = static_cast<std::byte*>(target_.data) + offset * std::ptrdiff_t(size_);
    const std::byte* probabilities = nullptr;
    if (probabilities_ != nullptr) {
      const std::size_t size = target_.dtype == Dtype::kFloat64 ? 8 : 4;
      probabilities = probabilities_ + offset * std::ptrdiff_t(size);
      if (run.stride != 1) {
        copy_spaced(probabilities, run.stride, packed_probabilities_, 1, count, size);
        probabilities = reinterpret_cast<const std::byte*>(packed_probabilities_);
      }
    }
    if (run.stride == 1) {
      convert_(arguments_, words, lane, probabilities, out, count);
      return;
    }
    convert_(arguments_, words, lane, probabilities, packed_, count);
    copy_spaced(packed_, 1, out, run.stride, count, size_);
  }

  const PhiloxTarget& target_;
  const PhiloxStream& stream_;
  const PhiloxConvert convert_;
  const PhiloxArguments& arguments_;
  const std::byte* const probabilities_;
  const std::size_t size_;
  alignas(64) std::uint32_t storage_[4][kChunk];
  std::uint32_t* const words_[4] = {storage_[0], storage_[1], storage_[2], storage_[3]};
  alignas(64) std::uint32_t in_order_[kChunk];
  alignas(64) std::uint64_t packed_[kChunk], packed_probabilities_[kChunk];
};

}  // namespace

bool fill_philox(const PhiloxTarget& target, const PhiloxStream& stream, PhiloxKind kind,
                 const PhiloxArguments& arguments, const void* probabilities) {
  const PhiloxConvert convert = kernel_set().philox_convert(kind, target.dtype);
  if (convert == nullptr) return false;
  PhiloxFill fill(target, stream, convert, arguments, probabilities);
  std::size_t launch = 0;
  walk(target.grid, [&](DrawRun run) {
    while (run.count > 0) {
      // Runs and launches both ascend.
      while (stream.launches[launch].stop <= run.draw) ++launch;
      const PhiloxLaunch& current = stream.launches[launch];
      const std::int64_t count = std::min(run.count, current.stop - run.draw);
      fill.draw(current, DrawRun{run.draw - current.start, count, run.local, run.stride});
      run = DrawRun{run.draw + count, run.count - count, run.local + count * run.stride,
                    run.stride};
    }
  });
  return true;
}

}  // namespace dist_rng
