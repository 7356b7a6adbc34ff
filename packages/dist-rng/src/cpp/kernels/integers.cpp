// random_: source ATen/core/TransformationHelper.h, uniform_int_from_to and uniform_int.
#include "element.h"
#include "kernels.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

constexpr std::uint64_t kFirstLongRange = std::uint64_t{1} << 28;  // from here 64 bits are drawn

// Sums wrap, as they do in torch.
inline std::int64_t add(std::uint64_t value, std::int64_t base) {
  return static_cast<std::int64_t>(value + static_cast<std::uint64_t>(base));
}

// x % divisor without a division. The quotient is off by less than 2^-20 / divisor, and a quotient
// that is not an integer is at least 1 / divisor below the next one: only an exact multiple can be
// rounded down, by one (49 * (1.0 / 49) < 1), and no quotient is rounded up.
inline std::uint32_t modulo(std::uint32_t x, double reciprocal, std::uint32_t divisor) {
  const auto quotient = static_cast<std::int32_t>(static_cast<double>(x) * reciprocal);
  const std::uint32_t rest = x - static_cast<std::uint32_t>(quotient) * divisor;
  return rest == divisor ? 0 : rest;
}

template <typename T>
bool convert_short(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
                   std::int64_t count) {
  const auto range = static_cast<std::uint32_t>(arguments.range);
  T* elements = static_cast<T*>(out);
  if (range < 3) {  // a quotient of 2^31 or more would overflow an int32
    for (std::int64_t i = 0; i < count; ++i) {
      elements[i] = cast<T>(add(words[i] & (range - 1), arguments.base));
    }
    return true;
  }
  const double reciprocal = 1.0 / range;
  for (std::int64_t i = 0; i < count; ++i) {
    elements[i] = cast<T>(add(modulo(words[i], reciprocal, range), arguments.base));
  }
  return true;
}

template <typename T>
bool convert_long(const Arguments& arguments, const std::uint32_t* words, const void*, void* out,
                  std::int64_t count) {
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    elements[i] = cast<T>(add(draw_64(words + 2 * i) % arguments.range, arguments.base));
  }
  return true;
}

template <typename T>
bool convert_all(const Arguments&, const std::uint32_t* words, const void*, void* out,
                 std::int64_t count) {
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, bool>) {
      elements[i] = words[i] & 1;
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      elements[i] = static_cast<T>(draw_64(words + 2 * i) & ~(std::uint64_t{1} << 63));
    } else if constexpr (std::is_same_v<T, double>) {
      elements[i] = static_cast<T>(draw_64(words + 2 * i) % ((std::uint64_t{1} << 53) + 1));
    } else if constexpr (std::is_integral_v<T>) {
      constexpr auto kMask = static_cast<std::uint32_t>(std::numeric_limits<T>::max());
      elements[i] = static_cast<T>(words[i] & kMask);
    } else {
      elements[i] = cast<T>(words[i] % ((1u << kDigits<T>)+1));
    }
  }
  return true;
}

}  // namespace

Kernel integers(Dtype dtype, const Arguments& arguments) {
  return for_every(dtype, [&]<typename T>() -> Kernel {
    if (arguments.range >= kFirstLongRange) return {convert_long<T>, 2};
    return {convert_short<T>, 1};
  });
}

Kernel all_integers(Dtype dtype, const Arguments&) {
  return for_common(dtype, []<typename T>() -> Kernel {
    constexpr bool kLong = std::is_same_v<T, std::int64_t> || std::is_same_v<T, double>;
    return {convert_all<T>, kLong ? 2 : 1};
  });
}

}  // namespace dist_rng::DIST_RNG_ISA
