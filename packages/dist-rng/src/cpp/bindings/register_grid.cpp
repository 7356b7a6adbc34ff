#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "../local_grid.h"

namespace py = pybind11;

namespace dist_rng {
namespace {

using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

std::vector<IndexRange> nonempty(const Ranges& ranges) {
  std::vector<IndexRange> converted;
  for (const auto& [start, stop] : ranges) {
    if (start < stop) converted.push_back({start, stop});
  }
  return converted;
}

LocalGrid make_grid(const std::vector<Ranges>& pieces,
                    const std::vector<std::int64_t>& draw_strides,
                    const std::vector<std::int64_t>& local_strides,
                    const std::optional<Ranges>& windows) {
  if (pieces.size() != draw_strides.size() || pieces.size() != local_strides.size()) {
    throw py::value_error(
        "LocalGrid: expected pieces, draw_strides and local_strides of one length");
  }
  LocalGrid grid;
  for (std::size_t d = 0; d < pieces.size(); ++d) {
    grid.dims.push_back({nonempty(pieces[d]), draw_strides[d], local_strides[d]});
  }
  grid.windowed = windows.has_value();
  if (windows) grid.windows = nonempty(*windows);
  grid.simplify();
  return grid;
}

std::vector<std::vector<std::int64_t>> runs_of(const LocalGrid& grid) {
  std::vector<std::vector<std::int64_t>> runs;
  walk(grid, [&](const DrawRun& run) {
    runs.push_back({run.draw, run.count, run.local, run.stride});
  });
  return runs;
}

}  // namespace

void register_grid(py::module_& module) {
  py::class_<LocalGrid>(module, "LocalGrid")
      .def(py::init(&make_grid), py::arg("pieces"), py::arg("draw_strides"),
           py::arg("local_strides"), py::arg("windows") = py::none())
      .def("runs", &runs_of);
}

}  // namespace dist_rng
