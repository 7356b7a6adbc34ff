// The grid of elements that a local tensor holds, and the walk over it in draw order.
//
// The C++ counterpart of Region.runs() in regions/region.py. A LocalGrid lists the dims in memory
// order, outermost first. Runs come in ascending draw order and are as long as the local strides
// allow: neighbouring dims are joined where both the draws and the local elements continue without
// a gap, so a Shard(0) is one run. No torch, no Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dist_rng {

// The indices start <= i < stop.
struct IndexRange {
  std::int64_t start;
  std::int64_t stop;
};

// Consecutive draws whose elements are evenly spaced in the local tensor.
struct DrawRun {
  std::int64_t draw;    // draw index of the first element
  std::int64_t count;   // elements
  std::int64_t local;   // offset of the first element in the local tensor, in elements
  std::int64_t stride;  // distance of neighbours in the local tensor, in elements
};

struct GridDim {
  std::vector<IndexRange> pieces;  // ascending, none empty
  std::int64_t draw_stride;        // of the global tensor, dense in memory order
  std::int64_t local_stride;       // of the local tensor, in elements

  std::int64_t size() const {
    std::int64_t count = 0;
    for (const IndexRange& piece : pieces) count += piece.stop - piece.start;
    return count;
  }
};

struct LocalGrid {
  std::vector<GridDim> dims;        // outermost in memory first
  std::vector<IndexRange> windows;  // ranges of the grid's elements in memory order; if windowed
  bool windowed = false;            // the local tensor holds only the windows, packed
  std::int64_t draw = 0;            // draw offset of the dims that were dropped

  // Elements of the grid without regard to the windows.
  std::int64_t numel() const {
    std::int64_t count = 1;
    for (const GridDim& dim : dims) count *= dim.size();
    return count;
  }

  // Drops dims of one index, and joins a dim with the next inner one where that one is a single
  // range. The walk is correct without it, only slower.
  void simplify() {
    std::vector<GridDim> simplified;
    for (GridDim& dim : dims) {
      if (dim.size() == 1) {
        draw += dim.pieces[0].start * dim.draw_stride;
        continue;
      }
      const bool single_range = dim.pieces.size() == 1 && !simplified.empty();
      const std::int64_t size = single_range ? dim.size() : 0;
      if (single_range && simplified.back().draw_stride == size * dim.draw_stride &&
          simplified.back().local_stride == size * dim.local_stride) {
        draw += dim.pieces[0].start * dim.draw_stride;
        for (IndexRange& piece : simplified.back().pieces) {
          piece = {piece.start * size, piece.stop * size};
        }
        simplified.back().draw_stride = dim.draw_stride;
        simplified.back().local_stride = dim.local_stride;
      } else {
        simplified.push_back(std::move(dim));
      }
    }
    dims = std::move(simplified);
  }
};

// Calls visit(DrawRun) for the grid's elements first <= position < last, `shift` added to `local`.
template <typename Visit>
void walk_range(const LocalGrid& grid, std::int64_t first, std::int64_t last, std::int64_t shift,
                Visit&& visit) {
  if (first >= last) return;
  if (grid.dims.empty()) {
    visit(DrawRun{grid.draw, 1, shift, 1});
    return;
  }
  struct Position {
    std::size_t piece;
    std::int64_t global_index;
    std::int64_t local_index;
  };
  // Per dim the position of element `first`: its digits in the mixed radix of the dims' sizes.
  const std::size_t inner = grid.dims.size() - 1;
  std::vector<Position> positions(grid.dims.size());
  std::int64_t rest = first, draw = grid.draw, local = shift;
  for (std::size_t d = grid.dims.size(); d-- > 0;) {
    const GridDim& dim = grid.dims[d];
    const std::int64_t size = dim.size();
    Position& position = positions[d];
    position = {0, 0, rest % size};
    rest /= size;
    std::int64_t before = position.local_index;
    while (before >= dim.pieces[position.piece].stop - dim.pieces[position.piece].start) {
      before -= dim.pieces[position.piece].stop - dim.pieces[position.piece].start;
      ++position.piece;
    }
    position.global_index = dim.pieces[position.piece].start + before;
    draw += position.global_index * dim.draw_stride;
    local += position.local_index * dim.local_stride;
  }
  const GridDim& row = grid.dims[inner];
  // The innermost dim makes runs only where its draws are consecutive: its draw stride is 1 unless
  // simplify() dropped a dim inside of it.
  const bool dense = row.draw_stride == 1;
  for (std::int64_t left = last - first; left > 0;) {
    const IndexRange& piece = row.pieces[positions[inner].piece];
    const std::int64_t available = dense ? piece.stop - positions[inner].global_index : 1;
    const std::int64_t count = std::min(left, available);
    visit(DrawRun{draw, count, local, row.local_stride});
    left -= count;
    if (left == 0) return;
    // Advance the innermost dim by `count` and carry into the outer ones.
    std::int64_t step = count;
    for (std::size_t d = grid.dims.size(); d-- > 0;) {
      const GridDim& dim = grid.dims[d];
      Position& position = positions[d];
      position.global_index += step;
      position.local_index += step;
      draw += step * dim.draw_stride;
      local += step * dim.local_stride;
      if (position.global_index < dim.pieces[position.piece].stop) break;
      const std::size_t next = position.piece + 1;
      const bool carry = next == dim.pieces.size();
      const IndexRange& to = dim.pieces[carry ? 0 : next];
      draw += (to.start - position.global_index) * dim.draw_stride;
      position.global_index = to.start;
      position.piece = carry ? 0 : next;
      if (!carry) break;
      local -= position.local_index * dim.local_stride;
      position.local_index = 0;
      step = 1;
    }
  }
}

// Calls visit(DrawRun) for everything that the local tensor holds, in ascending draw order.
template <typename Visit>
void walk(const LocalGrid& grid, Visit&& visit) {
  if (!grid.windowed) {
    walk_range(grid, 0, grid.numel(), 0, visit);
    return;
  }
  std::int64_t packed = 0;
  for (const IndexRange& window : grid.windows) {
    walk_range(grid, window.start, window.stop, packed - window.start, visit);
    packed += window.stop - window.start;
  }
}

// Copies `count` evenly spaced elements: between a packed buffer and the elements of a run.
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
