// Copies between a packed buffer and evenly spaced elements, by element size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dist_rng {

template <typename T>
void copy_spaced(const T* from, std::int64_t from_stride, T* to, std::int64_t to_stride,
                 std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
}

inline void copy_spaced(const void* from, std::int64_t from_stride, void* to,
                        std::int64_t to_stride, std::int64_t count, std::size_t size) {
  const auto copy = [&](auto type) {
    using T = decltype(type);
    copy_spaced(static_cast<const T*>(from), from_stride, static_cast<T*>(to), to_stride, count);
  };
  switch (size) {
    case 1:
      return copy(std::uint8_t{});
    case 2:
      return copy(std::uint16_t{});
    case 4:
      return copy(std::uint32_t{});
    default:
      return copy(std::uint64_t{});
  }
}

}  // namespace dist_rng
