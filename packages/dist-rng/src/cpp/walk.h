// The C++ counterpart of region.py's Region.runs(): which draws a local tensor holds, and where.
//
// A Grid lists the dims in memory order, outermost first. Runs come in ascending draw order and
// are as long as the local strides allow: neighbouring dims are joined where both the draws and
// the local elements go on without a gap, so a Shard(0) is one run. No torch, no Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dist_rng {

// The indices start <= i < stop.
struct Piece {
  std::int64_t start;
  std::int64_t stop;
};

// Consecutive draws that go to evenly spaced places of the local tensor, in elements.
struct Run {
  std::int64_t draw;
  std::int64_t count;
  std::int64_t local;
  std::int64_t stride;
};

struct Dim {
  std::vector<Piece> pieces;  // ascending, none empty
  std::int64_t draw_stride;   // of the global tensor, dense in memory order
  std::int64_t local_stride;  // of the local tensor, in elements

  std::int64_t held() const {
    std::int64_t count = 0;
    for (const Piece& piece : pieces) count += piece.stop - piece.start;
    return count;
  }
};

struct Grid {
  std::vector<Dim> dims;       // outermost in memory first
  std::vector<Piece> windows;  // of the grid's elements, in memory order; only if windowed
  bool windowed = false;       // the local tensor holds the windows alone, packed
  std::int64_t draw = 0;       // of the elements at position 0 of the dims that were dropped

  // Elements of the grid, whatever the windows.
  std::int64_t numel() const {
    std::int64_t count = 1;
    for (const Dim& dim : dims) count *= dim.held();
    return count;
  }

  // Drops dims that hold one index, and joins a dim with the next inner one where that is whole.
  // Walking is correct without it, only slower.
  void simplify() {
    std::vector<Dim> kept;
    for (Dim& dim : dims) {
      if (dim.held() == 1) {
        draw += dim.pieces[0].start * dim.draw_stride;
        continue;
      }
      const bool whole = dim.pieces.size() == 1 && !kept.empty();
      const std::int64_t size = whole ? dim.held() : 0;
      if (whole && kept.back().draw_stride == size * dim.draw_stride &&
          kept.back().local_stride == size * dim.local_stride) {
        draw += dim.pieces[0].start * dim.draw_stride;
        for (Piece& piece : kept.back().pieces) piece = {piece.start * size, piece.stop * size};
        kept.back().draw_stride = dim.draw_stride;
        kept.back().local_stride = dim.local_stride;
      } else {
        kept.push_back(std::move(dim));
      }
    }
    dims = std::move(kept);
  }
};

// Calls visit(Run) for the grid's elements first <= position < last, `shift` added to `local`.
template <typename Visit>
void walk_range(const Grid& grid, std::int64_t first, std::int64_t last, std::int64_t shift,
                Visit&& visit) {
  if (first >= last) return;
  if (grid.dims.empty()) {
    visit(Run{grid.draw, 1, shift, 1});
    return;
  }
  struct Place {
    std::size_t piece;
    std::int64_t index;  // inside the global dim
    std::int64_t held;   // inside the local dim
  };
  // Where `first` lies: its digits in the mixed radix of the dims' held counts.
  const std::size_t inner = grid.dims.size() - 1;
  std::vector<Place> places(grid.dims.size());
  std::int64_t rest = first, draw = grid.draw, local = shift;
  for (std::size_t d = grid.dims.size(); d-- > 0;) {
    const Dim& dim = grid.dims[d];
    const std::int64_t held = dim.held();
    Place& place = places[d];
    place = {0, 0, rest % held};
    rest /= held;
    std::int64_t before = place.held;
    while (before >= dim.pieces[place.piece].stop - dim.pieces[place.piece].start) {
      before -= dim.pieces[place.piece].stop - dim.pieces[place.piece].start;
      ++place.piece;
    }
    place.index = dim.pieces[place.piece].start + before;
    draw += place.index * dim.draw_stride;
    local += place.held * dim.local_stride;
  }
  const Dim& row = grid.dims[inner];
  // The innermost dim gives the runs only where its draws are consecutive: it is whole dims of
  // size one that may lie inside it, so its draw stride is 1 unless simplify() dropped a dim.
  const bool dense = row.draw_stride == 1;
  for (std::int64_t left = last - first; left > 0;) {
    const Piece& piece = row.pieces[places[inner].piece];
    const std::int64_t reach = dense ? piece.stop - places[inner].index : 1;
    const std::int64_t count = std::min(left, reach);
    visit(Run{draw, count, local, row.local_stride});
    left -= count;
    if (left == 0) return;
    // One step of the odometer: the innermost dim moves by `count`, the others by carry.
    std::int64_t step = count;
    for (std::size_t d = grid.dims.size(); d-- > 0;) {
      const Dim& dim = grid.dims[d];
      Place& place = places[d];
      place.index += step;
      place.held += step;
      draw += step * dim.draw_stride;
      local += step * dim.local_stride;
      if (place.index < dim.pieces[place.piece].stop) break;
      const std::size_t next = place.piece + 1;
      const bool carry = next == dim.pieces.size();
      const Piece& to = dim.pieces[carry ? 0 : next];
      draw += (to.start - place.index) * dim.draw_stride;
      place.index = to.start;
      place.piece = carry ? 0 : next;
      if (!carry) break;
      local -= place.held * dim.local_stride;
      place.held = 0;
      step = 1;
    }
  }
}

// Calls visit(Run) for everything that the local tensor holds, in ascending draw order.
template <typename Visit>
void walk(const Grid& grid, Visit&& visit) {
  if (!grid.windowed) {
    walk_range(grid, 0, grid.numel(), 0, visit);
    return;
  }
  std::int64_t packed = 0;
  for (const Piece& window : grid.windows) {
    walk_range(grid, window.start, window.stop, packed - window.start, visit);
    packed += window.stop - window.start;
  }
}

}  // namespace dist_rng
