#include <pybind11/native_enum.h>

#include "dtensor_rules/methods/attribute.h"
#include "dtensor_rules/dispatch/dispatch.h"
#include "dtensor_rules/dispatch/explicit_only.h"
#include "dtensor_rules/dispatch/kernels.h"
#include "dtensor_rules/plans/plan.h"
#include "dtensor_rules/register.h"
#include "dtensor_rules/plans/stats.h"
#include "dtensor_rules/dispatch/watch.h"

namespace dtensor_rules {

void register_dispatch(py::module_& module) {
  py::class_<Transform, std::shared_ptr<Transform>>(module, "Transform")
      .def("apply", &transformed, py::arg("local"))
      .def_property_readonly("communicates", &Transform::communicates);
  py::class_<Finish, std::shared_ptr<Finish>>(module, "Finish");
  py::class_<LogicalAnd, Finish, std::shared_ptr<LogicalAnd>>(module, "LogicalAnd")
      .def(py::init<std::string, std::string>(), py::arg("group_name"), py::arg("device"));
  py::class_<RuleCounter, std::shared_ptr<RuleCounter>>(module, "RuleCounter")
      .def(py::init<>())
      .def_property(
          "hits", [](const RuleCounter& counter) { return counter.hits.load(); },
          [](RuleCounter& counter, uint64_t hits) { counter.hits = hits; });
  module.def("find_torch_classes", &find_torch_classes);
  module.def("install_kernel", &install_kernel);
  module.def("remove_kernels", &remove_kernels);
  module.def("set_attribute_answered", &set_attribute_answered);
  module.def("set_cpu_gathers", &set_cpu_gathers);
  module.def("set_planner", &set_planner);
  module.def("watch", &watch);
  module.def("key_words", &key_words);
  module.def("scalar_type", [](c10::ScalarType dtype) { return static_cast<int>(dtype); });
  module.def(
      "device_type", [](const at::Device& device) { return static_cast<int>(device.type()); });
  py::native_enum<Path>(module, "Path", "enum.Enum")
      .value("AS_SET", Path::kAsSet)
      .value("UNCHECKED", Path::kUnchecked)
      .value("TORCH", Path::kTorch)
      .finalize();
  module.def("set_checker", &set_checker);
  module.def("set_explicit_only", &set_explicit_only);
  module.def("set_fallback_logger", &set_fallback_logger);
  module.def("set_path", &set_path);
}

}  // namespace dtensor_rules
