#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "ragged_shard/arrange.h"
#include "ragged_shard/search.h"
#include "register.h"

namespace py = pybind11;

namespace ragged_shard {
namespace {

Problem make_problem(const std::vector<Size>& numels, const std::vector<Size>& blocks, Size ranks,
                     Size step) {
  if (numels.size() != blocks.size()) {
    throw py::value_error("numels and blocks differ in length");
  }
  std::vector<Tensor> tensors;
  tensors.reserve(numels.size());
  for (std::size_t i = 0; i < numels.size(); ++i) tensors.push_back({numels[i], blocks[i]});
  return Problem(std::move(tensors), ranks, step);
}

}  // namespace

void register_search(py::module_& module) {
  py::class_<Found>(module, "Found")
      .def_readonly("any", &Found::any)
      .def_readonly("shard", &Found::shard)
      .def_readonly("proved", &Found::proved)
      .def_readonly("nodes", &Found::nodes)
      .def_readonly("starts", &Found::starts);
  module.def(
      "search",
      [](const std::vector<Size>& numels, const std::vector<Size>& blocks, Size ranks, Size step,
         Size most_nodes) { return search(make_problem(numels, blocks, ranks, step), most_nodes); },
      py::arg("numels"), py::arg("blocks"), py::arg("ranks"), py::arg("step"),
      py::arg("most_nodes"));
  module.def(
      "arrange",
      [](const std::vector<Size>& numels, const std::vector<Size>& blocks, Size ranks,
         Size shard) { return arrange(make_problem(numels, blocks, ranks, 1), shard); },
      py::arg("numels"), py::arg("blocks"), py::arg("ranks"), py::arg("shard"));
}

}  // namespace ragged_shard
