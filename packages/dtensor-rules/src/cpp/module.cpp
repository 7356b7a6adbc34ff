#include "dtensor_rules/register.h"

PYBIND11_MODULE(_core, module) {
  module.attr("torch_version") = DTENSOR_RULES_TORCH_VERSION;
  dtensor_rules::register_redistribute(module);
}
