#include "dtensor_rules/register.h"
#include "dtensor_rules/plans/spec.h"

namespace dtensor_rules {

void register_specs(py::module_& module) {
  module.def("intern", [](const py::object& spec) { return intern(spec.ptr()).object; });
  module.def("spec_id", [](const py::object& spec) { return intern(spec.ptr()).id; });
  module.def("forget_spec", [](const py::object& spec) { return forget_spec(spec.ptr()); });
  module.def("clear_specs", &clear_specs);
  module.def("known_addresses", &known_addresses);
  module.def("known_specs", &known_specs);
}

}  // namespace dtensor_rules
