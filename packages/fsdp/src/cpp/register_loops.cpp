#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <vector>

#include "loops.h"
#include "register.h"

namespace py = pybind11;

namespace fsdp {
namespace {

std::vector<std::string_view> names() {
  std::vector<std::string_view> found;
  for (const Loops* each : all_loops()) found.push_back(each->name);
  return found;
}

void use(std::string_view name) {
  if (use_loops(name)) return;
  std::string text = "use_loops: this machine does not run '";
  text.append(name).append("'; it runs:");
  for (const std::string_view each : names()) text.append(" ").append(each);
  throw py::value_error(text);
}

}  // namespace

void register_loops(py::module_& module) {
  module.def("all_loops", &names);
  module.def("loops", [] { return loops().name; });
  module.def("use_loops", &use, py::arg("name"));
}

}  // namespace fsdp
