// The inner loops of the Philox emulator, compiled once per instruction set like kernel_set.h's.
#pragma once

#include <cstdint>

#include "../dtype.h"
#include "../philox_draw.h"

namespace dist_rng {

// Turns lane `lane` of `count` calls into as many elements. `words[j][i]` is word j of call i;
// `probabilities` are packed, and null but for Bernoulli of a tensor.
using PhiloxConvert = void (*)(const PhiloxArguments& arguments,
                               const std::uint32_t* const* words, int lane,
                               const void* probabilities, void* out, std::int64_t count);

struct PhiloxSet {
  // words[j][i], j < 4, i < count: what thread `thread + i` gets from its call of number `call`.
  void (*calls)(std::uint64_t seed, std::uint64_t call, std::uint64_t thread, std::int64_t count,
                std::uint32_t* const* words);
  // Null where torch does not have this distribution for this dtype.
  PhiloxConvert (*convert)(PhiloxKind kind, Dtype dtype);
};

// The best set that this processor runs.
const PhiloxSet& philox_set();

namespace baseline {
extern const PhiloxSet kPhilox;
}
namespace avx2 {
extern const PhiloxSet kPhilox;
}
namespace avx512 {
extern const PhiloxSet kPhilox;
}

}  // namespace dist_rng
