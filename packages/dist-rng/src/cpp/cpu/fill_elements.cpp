#include <algorithm>
#include <cstddef>

#include "fill.h"

namespace dist_rng {
namespace {

constexpr std::int64_t kChunk = 1024;  // elements at a time: words and values fit the L1 cache

}  // namespace

bool fill_elements(TorchState& state, const FillTarget& target, const Kernel& kernel,
                   const Arguments& arguments, const void* input, std::size_t input_size) {
  Mt19937 engine(state);
  const std::size_t size = size_of(target.dtype);
  alignas(64) std::uint32_t words[2 * kChunk];
  alignas(64) std::uint64_t packed[kChunk], packed_input[kChunk];
  bool valid = true;
  walk(target.grid, [&](const DrawRun& run) {
    engine.seek(run.draw * kernel.words);
    for (std::int64_t done = 0; done < run.count; done += kChunk) {
      const std::int64_t count = std::min(kChunk, run.count - done);
      const std::ptrdiff_t first = run.local + done * run.stride;
      std::byte* out = static_cast<std::byte*>(target.data) + first * std::ptrdiff_t(size);
      const std::byte* in = static_cast<const std::byte*>(input);
      if (in != nullptr) in += first * std::ptrdiff_t(input_size);
      engine.take(words, count * kernel.words);
      if (run.stride == 1) {
        valid &= kernel.convert(arguments, words, in, out, count);
        continue;
      }
      if (in != nullptr) {
        copy_spaced(in, run.stride, packed_input, 1, count, input_size);
        in = reinterpret_cast<const std::byte*>(packed_input);
      }
      valid &= kernel.convert(arguments, words, in, packed, count);
      copy_spaced(packed, 1, out, run.stride, count, size);
    }
  });
  engine.seek(target.global_numel * kernel.words);
  if (valid) engine.store(state);
  return valid;
}

}  // namespace dist_rng
