#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "register.h"
#include "walk.h"

namespace py = pybind11;

namespace dist_rng {
namespace {

using Pieces = std::vector<std::pair<std::int64_t, std::int64_t>>;

std::vector<Piece> pieces_of(const Pieces& pieces) {
  std::vector<Piece> converted;
  for (const auto& [start, stop] : pieces) {
    if (start < stop) converted.push_back({start, stop});
  }
  return converted;
}

Grid make_grid(const std::vector<Pieces>& pieces, const std::vector<std::int64_t>& draw_strides,
               const std::vector<std::int64_t>& local_strides,
               const std::optional<Pieces>& windows) {
  if (pieces.size() != draw_strides.size() || pieces.size() != local_strides.size()) {
    throw py::value_error("Grid: pieces, draw_strides and local_strides differ in length");
  }
  Grid grid;
  for (std::size_t d = 0; d < pieces.size(); ++d) {
    grid.dims.push_back({pieces_of(pieces[d]), draw_strides[d], local_strides[d]});
  }
  grid.windowed = windows.has_value();
  if (windows) grid.windows = pieces_of(*windows);
  grid.simplify();
  return grid;
}

std::vector<std::vector<std::int64_t>> runs_of(const Grid& grid) {
  std::vector<std::vector<std::int64_t>> runs;
  walk(grid, [&](const Run& run) {
    runs.push_back({run.draw, run.count, run.local, run.stride});
  });
  return runs;
}

}  // namespace

void register_walk(py::module_& module) {
  py::class_<Grid>(module, "Grid")
      .def(py::init(&make_grid), py::arg("pieces"), py::arg("draw_strides"),
           py::arg("local_strides"), py::arg("windows") = py::none())
      .def("runs", &runs_of);
}

}  // namespace dist_rng
